#!/bin/sh
# What an operator does in the first minutes, on a fresh Debian without network and compiler: install, init, hello, daemons, upgrade,
# purge.
. /package/common.sh

# Everything that could be left, but for what apt, dpkg and the system's own daemons keep.
everything() {
    find / -xdev \( -path /proc -o -path /sys -o -path /run -o -path /tmp -o -path /package -o -path /var/log -o -path /var/cache \
        -o -path /var/lib/dpkg -o -path /var/lib/apt -o -path /var/lib/systemd \) -prune -o -print | grep -v -e '^/etc/.*-$' | sort
    find /run /tmp -xdev -name '*harmonaize*' -o -xdev -name '*hello*'
    # The group rdma is libibverbs1's, which keeps it.
    cat /etc/passwd /etc/group | grep -v '^rdma:'
}

for program in cc gcc rustc cargo; do refuses command -v $program; done
everything > /package/before

say "install"
begun=$(seconds)
apt-get --quiet --quiet --yes --no-install-recommends install /package/harmonaize.deb > /package/apt.log 2>&1 || { cat /package/apt.log; exit 1; }
version=$(harmonaize --version)
echo "$version"
expected=$(cat /package/version)
for program in harmonaize harmonaize-agent harmonaize-control harmonaize-perf; do
    [ -z "$expected" ] || [ "$($program --version)" = "$program $expected" ] || fail "$program is not of $expected"
    [ -s /usr/share/man/man1/$program.1.gz ] || fail "no manual of $program"
done
for file in bash-completion/completions/harmonaize zsh/vendor-completions/_harmonaize fish/vendor_completions.d/harmonaize.fish; do
    grep -q explain /usr/share/$file || fail "no completion in $file"
done
for daemon in control agent aggregator; do
    [ "$(systemctl is-active harmonaize-$daemon || true)" = inactive ] || fail "$daemon runs before it has a certificate"
done

say "init"
harmonaize init | tail -1
as_daemon() { setpriv --reuid harmonaize --regid harmonaize --clear-groups "$@"; }
as_daemon test -r /etc/harmonaize/tls/control/tls.key || fail "control cannot read its key"
refuses as_daemon test -r /etc/harmonaize/tls/authority/ca.key
refuses as_daemon test -r /etc/harmonaize/tls/operators/admin/tls.key
refuses as_daemon test -w /etc/harmonaize/tls/control/tls.crt

say "hello"
ip link > /package/links
harmonaize hello
took=$(($(seconds) - begun))
echo "install, init and hello took $took s"
[ "$took" -lt 120 ] || fail "install, init and hello took two minutes or more"
everything > /package/after-hello
ip link | diff /package/links - || fail "hello left devices"
# Stopped in the middle, and killed there: nothing stays.
hellos() { pgrep -f '[r]un/harmonaize-hello'; }
for signal in INT KILL; do
    harmonaize hello > /package/hello 2>&1 &
    hello=$!
    soon grep -q emulated /package/hello
    soon hellos
    kill -$signal $hello
    if { wait $hello; } 2>/dev/null; then fail "hello was stopped and is content"; fi
    soon sh -c '! pgrep -f "[r]un/harmonaize-hello"'
    ip link | diff /package/links - || fail "hello left devices after SIG$signal"
done

say "daemons by the default configuration"
systemd-analyze verify --man=no /usr/lib/systemd/system/harmonaize-*.service || fail "units"
for daemon in control agent aggregator; do
    systemctl start harmonaize-$daemon || { systemctl status --no-pager harmonaize-$daemon; fail "$daemon does not start"; }
    systemd-analyze security --no-pager harmonaize-$daemon | tail -1
    systemd-analyze security --threshold=30 harmonaize-$daemon > /dev/null || fail "$daemon is exposed"
done
connected
harmonaize status | head -1 | tee /package/status
grep -q "control ${version#harmonaize }," /package/status || fail "status has no build"
harmonaize doctor || fail "doctor finds this host wrong"
sed 's/^listen = .*/listen = "10.9.9.9:7100"/' /etc/harmonaize/agent.toml > /etc/harmonaize/other.toml
refuses harmonaize doctor --config /etc/harmonaize/other.toml
harmonaize doctor --config /etc/harmonaize/other.toml --json 2>&1 | grep -q "none has 10.9.9.9" || fail "doctor is content with no address"
# Of another authority, which trusts ours: control alone can see that.
harmonaize init /etc/harmonaize/strange > /dev/null
cp /etc/harmonaize/tls/hosts/h0/ca.crt /etc/harmonaize/strange/hosts/h0/
sed 's/^tls = .*/tls = "strange\/hosts\/h0"/' /etc/harmonaize/agent.toml > /etc/harmonaize/other.toml
refuses harmonaize doctor --config /etc/harmonaize/other.toml
harmonaize doctor --config /etc/harmonaize/other.toml 2>/dev/null | grep "control *WRONG" || fail "doctor is content with a strange certificate"
harmonaize tenants add job --uid 65534 > /dev/null
soon test -S /run/harmonaize/tenants/job.sock
as_tenant $perf -n 5 | tail -4
refuses setpriv --reuid 65533 --clear-groups $perf -n 5
harmonaize top --once --agent unix:/run/harmonaize/telemetry.sock | grep -q 'tcp.*127.0.0.1:7000' || fail "no flow is measured"

say "watchdog"
mkdir /run/systemd/system/harmonaize-control.service.d
printf '[Service]\nWatchdogSec=2\n' > /run/systemd/system/harmonaize-control.service.d/watchdog.conf
systemctl daemon-reload
systemctl restart harmonaize-control
before=$(main_pid control)
sleep 5
[ "$before" = "$(main_pid control)" ] || fail "a living control was ended"
kill -STOP "$before"
soon sh -c "[ \"\$(systemctl show --property NRestarts --value harmonaize-control)\" = 1 ]"
connected
rm -r /run/systemd/system/harmonaize-control.service.d
systemctl daemon-reload

say "upgrades under load"
load 20
for _ in 1 2; do upgrade /package/harmonaize.deb; done
loaded
harmonaize top --once --agent unix:/run/harmonaize/telemetry.sock | grep -q 'tcp.*127.0.0.1:7000' || fail "the successor shows no flow"
ss --listening --tcp --numeric | grep -q 127.0.0.1:9477 || fail "the successor shows no metrics"
[ "$(systemctl show --property NRestarts --value harmonaize-agent)" = 0 ] || fail "systemd restarted the agent"
tr '\0' '\n' < /proc/"$(main_pid agent)"/environ | grep -q '^WATCHDOG_USEC=30000000' || fail "nobody watches the successor"
# systemd notices if the successor dies.
kill -KILL "$(main_pid agent)"
soon sh -c '[ "$(systemctl show --property NRestarts --value harmonaize-agent)" = 1 ]'
soon systemctl --quiet is-active harmonaize-agent
connected
# A reload without a new program is none of the process.
agent=$(main_pid agent)
systemctl reload harmonaize-agent
[ "$agent" = "$(main_pid agent)" ] || fail "a reload without an upgrade replaced the agent"
# One that cannot hand over goes on.
sed -i 's/^handover = /# handover = /' /etc/harmonaize/agent.toml
install_package /package/harmonaize.deb
grep -q "goes on as it was" /package/apt.log || fail "nobody says that the agent was not upgraded"
[ "$agent" = "$(main_pid agent)" ] || fail "an agent that cannot hand over was replaced"
connected
systemctl enable --quiet harmonaize-agent

say "purge"
apt-get --quiet --quiet --yes purge harmonaize > /package/apt.log 2>&1 || { cat /package/apt.log; exit 1; }
apt-get --quiet --quiet --yes autoremove --purge >> /package/apt.log 2>&1
if pgrep harmonaize; then fail "a daemon still runs"; fi
everything > /package/after
diff /package/before /package/after || fail "something stays after the purge"
touch /package/passed
say "done"
