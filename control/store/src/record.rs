//! The records. They are kept as protocol buffers: fields may be added, never renumbered or given another type.

/// A tenant that an operator added beside those of the configuration.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Tenant {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// When it was added, CLOCK_REALTIME in nanoseconds.
    #[prost(uint64, tag = "2")]
    pub added_ns: u64,
    /// Users whose processes may attach where agents serve it at control's word.
    #[prost(uint32, repeated, tag = "3")]
    pub uids: Vec<u32>,
    /// Where it may be; everywhere where empty.
    #[prost(string, repeated, tag = "4")]
    pub hosts: Vec<String>,
    /// `TenantQuota` of the provider's interface, encoded.
    #[prost(bytes = "vec", tag = "5")]
    pub quota: Vec<u8>,
}

/// Why something is withdrawn from use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum WithdrawalKind {
    /// From when it was said until it is taken back.
    Drain = 0,
    /// In a window of time.
    Maintenance = 1,
}

/// A host, switch or link that is to carry nothing.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Withdrawal {
    /// Its name in the topology; a link is "end:end".
    #[prost(string, tag = "1")]
    pub target: String,
    /// Why.
    #[prost(enumeration = "WithdrawalKind", tag = "2")]
    pub kind: i32,
    /// From when, CLOCK_REALTIME in nanoseconds.
    #[prost(uint64, tag = "3")]
    pub from_ns: u64,
    /// Until when, likewise; 0 for until it is taken back.
    #[prost(uint64, tag = "4")]
    pub until_ns: u64,
    /// The operator's words.
    #[prost(string, tag = "5")]
    pub reason: String,
}

/// What agents do not tell of a communicator's plans.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Plan {
    /// The communicator.
    #[prost(uint64, tag = "1")]
    pub communicator: u64,
    /// Whose.
    #[prost(string, tag = "2")]
    pub tenant: String,
    /// The tenant's name for it.
    #[prost(string, tag = "3")]
    pub name: String,
    /// Hosts of its participants, by index.
    #[prost(string, repeated, tag = "4")]
    pub hosts: Vec<String>,
    /// Number that no epoch has had yet.
    #[prost(uint64, tag = "5")]
    pub next_epoch: u64,
    /// The epoch in use; absent while the first is prepared.
    #[prost(message, optional, tag = "6")]
    pub current: Option<Epoch>,
    /// The epoch under way.
    #[prost(message, optional, tag = "7")]
    pub pending: Option<Epoch>,
    /// Whether an operator chose the order.
    #[prost(bool, tag = "8")]
    pub pinned: bool,
    /// What its operations told of codecs.
    #[prost(message, repeated, tag = "9")]
    pub losses: Vec<Loss>,
}

/// What operations by a codec came to, over what was predicted.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Loss {
    /// The codec's name.
    #[prost(string, tag = "1")]
    pub codec: String,
    /// Error.
    #[prost(double, tag = "2")]
    pub loss: f64,
    /// Bytes on the wire.
    #[prost(double, tag = "3")]
    pub bytes: f64,
}

/// One epoch of a communicator.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Epoch {
    /// Its number, from 1.
    #[prost(uint64, tag = "1")]
    pub epoch: u64,
    /// Ring order: indices of participants.
    #[prost(uint32, repeated, tag = "2")]
    pub order: Vec<u32>,
    /// Ports that its connections have taken.
    #[prost(message, repeated, tag = "3")]
    pub connections: Vec<Connection>,
    /// What each two participants are joined by.
    #[prost(message, repeated, tag = "4")]
    pub links: Vec<Link>,
    /// What each host sends to the next as planned, in bits a second; 0 where nothing was.
    #[prost(uint64, tag = "5")]
    pub share_bits: u64,
    /// What links are held to, in bits a second; 0 where they are not.
    #[prost(uint64, tag = "6")]
    pub pace_bits: u64,
    /// Predicted time of an operation, relative to an idle fabric, of a million; 0 where none was predicted.
    #[prost(uint64, tag = "7")]
    pub slowdown_ppm: u64,
    /// Why it was chosen.
    #[prost(string, tag = "8")]
    pub reason: String,
    /// Predicted time of a typical operation, in nanoseconds; 0 where none was predicted.
    #[prost(uint64, tag = "9")]
    pub predicted_ns: u64,
}

/// A connection of a communicator.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Connection {
    /// Host that connects.
    #[prost(string, tag = "1")]
    pub host: String,
    /// The port that it connects from.
    #[prost(uint32, tag = "2")]
    pub source_port: u32,
}

/// What joins two participants.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Link {
    /// Index of the one.
    #[prost(uint32, tag = "1")]
    pub low: u32,
    /// Index of the other, higher.
    #[prost(uint32, tag = "2")]
    pub high: u32,
    /// Port of each connection, at the end that connects; 0 where the kernel chooses.
    #[prost(uint32, repeated, tag = "3")]
    pub source_ports: Vec<u32>,
}

/// The topology that control was started with last.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Fabric {
    /// The file.
    #[prost(string, tag = "1")]
    pub text: String,
    /// Since when, CLOCK_REALTIME in nanoseconds.
    #[prost(uint64, tag = "2")]
    pub since_ns: u64,
}

/// What a tenant has been promised for a communicator.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Agreement {
    /// The communicator.
    #[prost(uint64, tag = "1")]
    pub communicator: u64,
    /// Counts its agreements from 1.
    #[prost(uint64, tag = "2")]
    pub number: u64,
    /// Since when, CLOCK_REALTIME in nanoseconds.
    #[prost(uint64, tag = "3")]
    pub since_ns: u64,
    /// What is promised: `Constraints` of the provider's interface, encoded.
    #[prost(bytes = "vec", tag = "4")]
    pub constraints: Vec<u8>,
    /// What is set aside, in bits a second that each host sends to the next; 0 for nothing.
    #[prost(uint64, tag = "5")]
    pub rate_bits: u64,
}

/// A communicator that failed, of which it was agreed on what becomes of it.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Past {
    /// The communicator.
    #[prost(uint64, tag = "1")]
    pub communicator: u64,
    /// Whose.
    #[prost(string, tag = "2")]
    pub tenant: String,
    /// The tenant's name for it.
    #[prost(string, tag = "3")]
    pub name: String,
    /// `Budget` of the provider's interface, encoded.
    #[prost(bytes = "vec", tag = "4")]
    pub budget: Vec<u8>,
    /// Hosts of its participants.
    #[prost(string, repeated, tag = "5")]
    pub hosts: Vec<String>,
    /// Its ranks that may go on, as it failed.
    #[prost(message, repeated, tag = "6")]
    pub ranks: Vec<PastRank>,
    /// What is kept of what was promised for it; absent once that is anybody's.
    #[prost(message, optional, tag = "7")]
    pub agreement: Option<Agreement>,
    /// How long its members have to go on, in nanoseconds; 0 where it was over at once.
    #[prost(uint64, tag = "8")]
    pub within_ns: u64,
    /// Until when, CLOCK_REALTIME in nanoseconds; 0 where it is over.
    #[prost(uint64, tag = "9")]
    pub until_ns: u64,
    /// Whether its members had more time because what they went on in did not come about.
    #[prost(bool, tag = "10")]
    pub prolonged: bool,
}

/// What runners do not tell of a job.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Job {
    /// Whose.
    #[prost(string, tag = "1")]
    pub tenant: String,
    /// Its name.
    #[prost(string, tag = "2")]
    pub name: String,
    /// Failures of its workers without an hour between them.
    #[prost(uint32, tag = "3")]
    pub recent_failures: u32,
    /// Those without a day between them: so long its workers wait before they start.
    #[prost(uint32, tag = "4")]
    pub failures: u32,
    /// When the last one was, CLOCK_REALTIME in nanoseconds.
    #[prost(uint64, tag = "5")]
    pub last_failure_ns: u64,
    /// Whether its workers have started together, and have formed no communicator yet: of an elastic job.
    #[prost(bool, tag = "6")]
    pub unformed: bool,
    /// What it bids; absent where its tenant has said nothing.
    #[prost(message, optional, tag = "7")]
    pub bid: Option<JobBid>,
    /// When it leaves hosts for which it was outbid, CLOCK_REALTIME in nanoseconds; 0 where it leaves none.
    #[prost(uint64, tag = "8")]
    pub leaves_ns: u64,
}

/// What a job bids for a worker an hour, in millionths of the operator's currency.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct JobBid {
    /// For each of its fewest workers.
    #[prost(uint64, tag = "1")]
    pub least_millionths: u64,
    /// For each further one.
    #[prost(uint64, tag = "2")]
    pub further_millionths: u64,
    /// The time between moments at which its workers can leave cheaply, in nanoseconds; 0 if they always can.
    #[prost(uint64, tag = "3")]
    pub checkpoint_ns: u64,
}

/// A rank of a communicator that failed.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct PastRank {
    /// The rank.
    #[prost(uint32, tag = "1")]
    pub rank: u32,
    /// Its host.
    #[prost(string, tag = "2")]
    pub host: String,
}
