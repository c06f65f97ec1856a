# arm64: ARMv8.0 without optional features, since the Cortex-A53 and A72 boards this is for have none that we could ask for.
TRIPLE := aarch64-unknown-linux-musl
# ring and zstd are C; `.cargo/config.toml` names the compiler.
PACKAGES := gcc-aarch64-linux-gnu libc6-dev-arm64-cross
