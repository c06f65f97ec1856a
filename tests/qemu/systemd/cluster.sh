#!/bin/sh
# Runs tests/cluster in this guest, where it needs no namespaces of its own: only the node's address and name, as
# tests/cluster/namespaces gives them.
set -eu
echo node >/proc/sys/kernel/hostname
echo '10.88.0.1 node' >>/etc/hosts
ip link set lo up
ip link add node0 type dummy
ip address add 10.88.0.1/24 dev node0
ip link set node0 up
# Addresses of services are translated after a route was found.
ip route add default via 10.88.0.254 dev node0
echo 1 >/proc/sys/net/ipv4/ip_forward
# The kubelet does not start the system bus, which it uses for cgroups.
systemctl start dbus.service
export CORACLE_CGROUP_DRIVER=systemd CORACLE_CLUSTER=/opt CORACLE_CLUSTER_TARGET=/opt/target CORACLE_TEST_DIR=/var/tmp
# One spec at a time: two processors emulate the whole cluster.
export PROCS=1 HOME=/root
FOCUS=$(cat /opt/focus)
export FOCUS
if [ -n "$FOCUS" ]; then set -- conformance; else set -- sample; fi
/opt/cluster "$@" && exit
# The disk with the logs does not outlive the guest.
for log in /opt/target/conformance*/*/e2e.log /var/tmp/*/logs/*.log /var/tmp/*/daemon.log; do
  echo "== the end of $log"
  tail -n 40 "$log"
done
exit 1
