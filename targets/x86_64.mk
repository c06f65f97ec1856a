# x86-64: the baseline psABI, so that any board runs it; hot loops (SHA-256, inflate) choose their code at run time.
TRIPLE := x86_64-unknown-linux-musl
# ring and zstd are C; musl-gcc is what cc-rs picks by itself.
PACKAGES := musl-tools
