#!/bin/busybox sh
# The first process: loads what the disk needs and goes on from there, with systemd where the command line says so.
b=/bin/busybox
$b mount -t devtmpfs devtmpfs /dev
$b mount -t proc proc /proc
for module in /modules/*.ko; do $b insmod "$module" || echo "not loaded: $module"; done
$b mount -t ext4 /dev/vda /root || exec $b poweroff -f
$b grep -q systemd.show_status /proc/cmdline && exec $b switch_root /root /lib/systemd/systemd
exec $b switch_root /root /bin/busybox sh /sbin/guest
