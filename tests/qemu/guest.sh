# The rest of a boot without an init system: what programs expect to find mounted.
/bin/busybox --install -s /bin
/bin/busybox --install -s /sbin
export PATH=/bin:/sbin
mount -t devtmpfs devtmpfs /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t securityfs securityfs /sys/kernel/security
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t tmpfs tmpfs /run
# As systemd leaves it: mounts travel.
mount --make-rshared /
hostname guest
ip link set lo up
echo "kernel $(uname -r), $(cat /sys/fs/cgroup/cgroup.controllers)"
exec sh /sbin/suite
