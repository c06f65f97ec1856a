# riscv64: RV64GC, the baseline of distributions.
TRIPLE := riscv64gc-unknown-linux-musl
# ring and zstd are C; `.cargo/config.toml` names the compiler.
PACKAGES := gcc-riscv64-linux-gnu libc6-dev-riscv64-cross
# Debian's names: of the architecture, and of a release that has it.
DEBIAN := riscv64
RELEASE := forky
