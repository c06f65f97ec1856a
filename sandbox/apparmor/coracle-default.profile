# AppArmor profile of containers that ask for the runtime's default (CRI: RuntimeDefault, or no profile at all).
#
# It is a second line behind capabilities, seccomp, masked and read-only paths: it still holds where a pod runs without those
# (procMount: Unmasked, SYS_ADMIN, SYS_PTRACE). Ordinary files, capabilities and programs are left to them.
#
# The kernel takes compiled policy only. coracle-default.bin is this file as apparmor_parser compiles it for the features in
# the file `features`; sandbox/apparmor/compile does that, and a test compares. What is not among these features, the kernel
# does not look at in this profile, whatever its version: network, user namespaces, io_uring, message queues.

# Descriptors from outside (log pipes, volumes) may have no path below the container's root; deleted files keep theirs.
profile coracle-default flags=(attach_disconnected, mediate_deleted) {
  file,
  capability,

  # What a container mounts would show files at paths that no rule below knows. Unmounting uncovers nothing of the node:
  # mounts of the container's root are its own.
  umount,
  deny mount,
  deny remount,
  deny pivot_root,

  # The monitor and the daemon run unconfined. Among containers, only processes under this profile.
  signal (receive) peer=unconfined,
  signal (send, receive) peer=coracle-default,
  ptrace (read, readby, trace, tracedby) peer=coracle-default,

  # procfs: processes' own directories begin with a digit and are theirs to write. Nothing else at the top level is, and
  # below sys only the limits of System V shared memory, which belong to the IPC namespace of the pod.
  deny /proc/[^1-9s]** wkl,
  deny /proc/s{[^y],y[^s],ys[^/]}** wkl,
  deny /proc/sys/{[^k],k[^e],ke[^r]}** wkl,
  deny /proc/sys/kernel/{[^s],s[^h],sh[^m]}** wkl,

  # Memory of the kernel and of devices, and the console's emergency commands: not even read.
  deny /proc/{kcore,kmem,mem,sysrq-trigger} rwklx,

  # sysfs: only cgroups are written, where they are delegated.
  deny /sys/{[^f],f[^s]}** wklx,
  deny /sys/fs/{[^c],c[^g],cg[^r]}** wklx,
  deny /sys/{firmware,kernel/security}/** rwklx,
}
