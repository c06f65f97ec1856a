# x86-64: the baseline psABI, so that any board runs it; hot loops (SHA-256, inflate) choose their code at run time.
TRIPLE := x86_64-unknown-linux-musl
# ring and zstd are C; musl-gcc is what cc-rs picks by itself.
PACKAGES := musl-tools
# Debian's names: of the architecture, and of the kernel that guests boot.
DEBIAN := amd64
KERNEL := linux-image-cloud-amd64
# What QEMU emulates. `max` is quick on x86: nothing in it costs more than a plain CPU.
QEMU := qemu-system-x86_64
QEMU_PACKAGE := qemu-system-x86
MACHINE := q35
CPU := max
# On a busy machine the emulated timer may tick too late for the kernel's test of it, which then panics.
KERNEL_WORDS := console=ttyS0 no_timer_check
# Modules of that kernel which a node with a virtual disk needs; ext4, cgroups and the serial port are built in.
MODULES := virtio_pci virtio_blk virtio_rng virtio_net overlay veth bridge tun
