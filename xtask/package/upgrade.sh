#!/bin/sh
# A host with the earlier of two packages is upgraded to the later, and back, while a tenant computes.
. /package/common.sh

build() { harmonaize status | head -1 | cut -d, -f1; }

say "the earlier package"
apt-get --quiet --quiet --yes --no-install-recommends install /package/earlier.deb > /package/apt.log 2>&1 || { cat /package/apt.log; exit 1; }
harmonaize init | tail -1
# Without it an agent hands over to none; release 0.1.0 leaves it to the operator.
grep -q '^handover = ' /etc/harmonaize/agent.toml ||
    sed -i '1i handover = "/run/harmonaize/handover.sock"' /etc/harmonaize/agent.toml
for daemon in control agent; do systemctl start harmonaize-$daemon || fail "$daemon does not start"; done
connected
earlier=$(build)
echo "$earlier"
harmonaize tenants add job --uid 65534 > /dev/null
soon test -S /run/harmonaize/tenants/job.sock

say "up and back under load"
load 30
upgrade /package/later.deb
later=$(build)
echo "$later"
[ "$later" != "$earlier" ] || fail "both packages are of one build"
control=$(main_pid control) agent=$(main_pid agent)
install_package /package/earlier.deb
[ "$control" != "$(main_pid control)" ] || fail "the way back did not restart control"
connected
[ "$(build)" = "$earlier" ] || fail "the way back ends at $(build)"
if [ "$agent" = "$(main_pid agent)" ]; then
    echo "the later agent goes on: the earlier package replaces none"
else
    echo "the agent is the earlier again"
fi
loaded
[ "$(systemctl show --property NRestarts --value harmonaize-agent)" = 0 ] || fail "systemd restarted the agent"
as_tenant $perf -n 5 | tail -4
touch /package/passed
say "done"
