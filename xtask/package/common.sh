# What the scripts of this folder begin with. A step that fails ends them.
set -eu
export LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive NO_COLOR=1
cd /

seconds() { cut -d. -f1 /proc/uptime; }
say() { echo "== $(seconds) s: $*"; }
fail() {
    echo "FAILED: $*"
    journalctl --quiet --no-pager --lines 30 --unit 'harmonaize-*' || true
    exit 1
}
refuses() { if "$@" >/dev/null 2>&1; then fail "$* worked"; fi; }
main_pid() { systemctl show --property MainPID --value "harmonaize-$1"; }
# Waits for a condition for at most ten seconds.
soon() {
    for _ in $(seq 100); do if "$@" >/dev/null 2>&1; then return; fi; sleep 0.1; done
    fail "not within 10 s: $*"
}
# Installs a package as an operator does whose configuration is to stay.
install_package() {
    dpkg --install --force-confold "$1" > /package/apt.log 2>&1 || { cat /package/apt.log; fail "$1 is not installed"; }
}
connected() { soon sh -c 'harmonaize status | grep "1 of 2 agents connected"'; }
as_tenant() { setpriv --reuid 65534 --clear-groups "$@"; }
perf="harmonaize-perf all_reduce --agent /run/harmonaize/tenants/job.sock --ranks 2 -b 1M -e 1M"
# Starts AllReduces of 1 MiB by a tenant's two ranks for about so many seconds, in the background.
load() {
    one_us=$(as_tenant $perf -n 5 | awk '$1 == 1048576 { print $6 }')
    operations=$(awk "BEGIN { print int($1 * 1e6 / $one_us) }")
    as_tenant $perf -n "$operations" > /package/load 2>&1 &
    load=$!
    sleep 1
}
# The load still ran, and ends without a failed operation.
loaded() {
    kill -0 $load || { cat /package/load; fail "the load ended before the upgrades"; }
    wait $load || { cat /package/load; fail "an operation failed"; }
    tail -4 /package/load
    echo "$operations operations"
}
# The package takes the places of the daemons that run.
upgrade() {
    control=$(main_pid control) agent=$(main_pid agent)
    install_package "$1"
    [ "$agent" != "$(main_pid agent)" ] || { cat /package/apt.log; fail "$1: the agent is the one of before"; }
    [ ! -e /proc/"$agent" ] || fail "$1: two agents"
    [ "$control" != "$(main_pid control)" ] || fail "$1 did not restart control"
    connected
}
