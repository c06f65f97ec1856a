# arm64: ARMv8.0 without optional features, since the Cortex-A53 and A72 boards this is for have none that we could ask for.
TRIPLE := aarch64-unknown-linux-musl
# ring and zstd are C; `.cargo/config.toml` names the compiler.
PACKAGES := gcc-aarch64-linux-gnu libc6-dev-arm64-cross
# Debian's names: of the architecture, and of the kernel that guests boot.
DEBIAN := arm64
KERNEL := linux-image-cloud-arm64
# What QEMU emulates. Not `max`: QEMU 7.2 emulates pointer authentication, five times slower; and the Cortex-A53 is the
# oldest CPU that coracle is for, so a guest shows that its baseline holds.
QEMU := qemu-system-aarch64
QEMU_PACKAGE := qemu-system-arm
MACHINE := virt
CPU := cortex-a53
KERNEL_WORDS := console=ttyAMA0
# Modules of that kernel which a node with a virtual disk needs; ext4, cgroups and the serial port are built in.
MODULES := virtio_pci virtio_blk virtio_rng virtio_net overlay veth bridge tun
