# Runs the suite that the kernel's command line names, and says how it ended: `CORACLE_SUITE=NAME`, with `CORACLE_TESTS=A,B`
# for some of its tests and any other `CORACLE_…=…` for the suite itself. What hangs is the harness' to notice.
# Debian's programs before busybox, whose nsenter would run its own ip.
export PATH=/opt/tools/bin:/usr/bin:/usr/sbin:/bin:/sbin CORACLE_BIN_DIR=/opt CORACLE_TOOLS_DIR=/opt/tools RUST_BACKTRACE=0
# Emulation, on cores that others use: what should hold at once is waited for accordingly.
export CORACLE_SLOWNESS=6
for word in $(cat /proc/cmdline); do
  case $word in CORACLE_*=*) export "$word" ;; esac
done
flags="--test-threads=1 --show-output"
# It has no test harness.
[ "$CORACLE_SUITE" != bench ] || flags=
# Words on purpose: one test each.
"/opt/$CORACLE_SUITE" $flags $CORACLE_FLAGS $(echo "$CORACLE_TESTS" | tr , ' ') 2>&1
code=$?
[ $code = 0 ] || ! [ -x /bin/journalctl ] || journalctl --boot --no-pager --lines=100
echo "DONE $code"
poweroff -f
