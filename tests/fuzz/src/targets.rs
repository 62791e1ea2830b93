//! The table of the targets, a file for each room's.

mod agents;
mod aggregation;
mod control;
mod files;
mod tenants;

use crate::Target;

/// All of them.
pub const TARGETS: &[Target] = &[
    Target { name: "session", about: "what tenant and agent say on the socket", run: tenants::session },
    Target { name: "descriptor", about: "a descriptor and its counts", run: tenants::descriptor },
    Target {
        name: "rings",
        about: "what a tenant writes into the rings' memory, and when",
        run: tenants::rings,
    },
    Target { name: "remote", about: "the stream of an attachment that maps nothing", run: tenants::remote },
    Target { name: "frames", about: "the stream between two agents", run: agents::frames },
    Target {
        name: "handshake",
        about: "the first words of a connection between agents",
        run: agents::handshake,
    },
    Target { name: "records", about: "the records of a protected link", run: agents::records },
    Target { name: "exchange", about: "parameters of queue pairs, and mailboxes", run: agents::exchange },
    Target { name: "accept", about: "a link over RDMA as it comes up, frames changed", run: agents::accept },
    Target { name: "communicator", about: "messages of a peer to a communicator", run: agents::communicator },
    Target { name: "probe", about: "datagrams of trains, and answers of switches", run: agents::probe },
    Target { name: "chunk", about: "a compressed chunk, on every instruction set", run: agents::chunk },
    Target { name: "packets", about: "packets of workers to an aggregator", run: aggregation::packets },
    Target { name: "worker", about: "packets of an aggregator to a worker", run: aggregation::worker },
    Target { name: "control", about: "messages of two agents to control", run: control::messages },
    Target { name: "recipe", about: "what control has an agent form", run: control::recipe },
    Target { name: "configuration", about: "the file of an agent, or of control", run: files::configuration },
    Target { name: "topology", about: "a topology's file", run: files::topology },
    Target { name: "trace", about: "a trace's file, and what is found in it", run: files::trace },
];
