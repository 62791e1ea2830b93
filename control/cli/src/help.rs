//! Examples at the end of commands' help, where the command has no file of its own.

/// Of `status`.
pub(crate) const STATUS: &str = "\
Examples:
  harmonaize status                           what is connected, formed and in flight
  harmonaize status --watch=5s                the same again every five seconds
  harmonaize status --json | jq '.communicators[] | {name, phase, errors}'
  harmonaize status -o jsonpath='{.agents[?@.connected==false].host}'
  harmonaize status --patience 10s            where agents are slow to answer";

/// Of `topology`.
pub(crate) const TOPOLOGY: &str = "\
Examples:
  harmonaize topology                         what control takes each link to carry, and what is drained or failed
  harmonaize topology --json | jq '.links[] | select(.state != \"ok\")'
  harmonaize topology check fabric.toml       is the file right? if not, which line?
  harmonaize topology show fabric.toml        its hosts, switches, links, and the ring over all hosts
  harmonaize topology import lldp hosts/*.json > topology.toml
  harmonaize topology new --racks 4 --hosts 16 --spines 2 > topology.toml
  harmonaize topology discover --out topology.toml    of the routes that agents traced";

/// Of `plans`.
pub(crate) const PLANS: &str = "\
Examples:
  harmonaize plans                            of all communicators
  harmonaize plans a/world                    of one
  harmonaize plans --json | jq '.plans[] | {name, order, reason}'";

/// Of `plan`.
pub(crate) const PLAN: &str = "\
Examples:
  harmonaize plan --dry-run                   what control would change now
  harmonaize plan --dry-run --drain spine0,leaf1:spine1
  harmonaize plan --dry-run --drain h3 --json | jq .changed";

/// Of `reorder`.
pub(crate) const REORDER: &str = "\
Examples:
  harmonaize reorder a/world h0,h2,h1,h3      waits until the new order is in use
  harmonaize reorder 5f3a9c1200000001 h1,h0 --wait 0s
  harmonaize reorder a/world --automatic      control chooses its order again";

/// Of `dissolve`.
pub(crate) const DISSOLVE: &str = "\
Examples:
  harmonaize dissolve a/world --reason 'its tenant asked for it'
  harmonaize dissolve 5f3a9c1200000001        by its id, which `harmonaize status` shows";

/// Of `top`.
pub(crate) const TOP: &str = "\
Examples:
  harmonaize top                              all hosts, as control knows them
  harmonaize top --host h0,h1 --tenant a      two hosts, and the communicators of a tenant over them
  harmonaize top --agent unix:/run/harmonaize/telemetry.sock --filter 10.64.0.7
  harmonaize top --once --width 120           one picture as plain text, for scripts
  harmonaize top --once -o json               all that it shows, for programs

Keys: q quit; Tab, 1-7 another panel; Enter the panel alone; s, S another column to sort by; r the other
way round; / filter; arrows scroll; p pause; ? help.";
