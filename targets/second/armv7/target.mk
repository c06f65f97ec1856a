# armv7: ARMv7-A with VFP and without NEON, hard-float, as boards with a Cortex-A7 or newer have it.
TRIPLE := armv7-unknown-linux-musleabihf
# ring and zstd are C; `.cargo/config.toml` names the compiler.
PACKAGES := gcc-arm-linux-gnueabihf libc6-dev-armhf-cross
# Debian's names: of the architecture, of the release that has it, and of the kernel that guests boot.
DEBIAN := armhf
RELEASE := bookworm
KERNEL := linux-image-armmp
# What QEMU emulates.
QEMU := qemu-system-arm
QEMU_PACKAGE := qemu-system-arm
# Without it PCI is above 4 GB, where this kernel, which has no LPAE, does not reach.
MACHINE := virt,highmem=off
CPU := cortex-a7
KERNEL_WORDS := console=ttyAMA0
# Modules of that kernel which a node with a virtual disk needs; cgroups and the serial port are built in.
MODULES := crc32c_generic ext4 virtio_pci virtio_blk virtio_rng virtio_net overlay veth bridge tun
