//! The messages of etcd's interface (`etcdserverpb`, version 3) that control needs, with its numbers of fields.

/// A record, or what a record was.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct KeyValue {
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    #[prost(int64, tag = "2")]
    pub create_revision: i64,
    #[prost(bytes = "vec", tag = "5")]
    pub value: Vec<u8>,
    #[prost(int64, tag = "6")]
    pub lease: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Header {
    #[prost(int64, tag = "3")]
    pub revision: i64,
}

/// The keys from `key` until `range_end`; `key` alone where that is empty.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Range {
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub range_end: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct RangeReply {
    #[prost(message, repeated, tag = "2")]
    pub kvs: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Put {
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub value: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub lease: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Delete {
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
}

/// One step of a transaction.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Operation {
    #[prost(oneof = "Step", tags = "1, 2, 3")]
    pub step: Option<Step>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub(super) enum Step {
    #[prost(message, tag = "1")]
    Range(Range),
    #[prost(message, tag = "2")]
    Put(Put),
    #[prost(message, tag = "3")]
    Delete(Delete),
}

/// A condition of a transaction: what is found equals `wanted`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Compare {
    /// 1 for the revision of creation, 3 for the value.
    #[prost(int32, tag = "2")]
    pub target: i32,
    #[prost(bytes = "vec", tag = "3")]
    pub key: Vec<u8>,
    #[prost(oneof = "Wanted", tags = "5, 7")]
    pub wanted: Option<Wanted>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub(super) enum Wanted {
    #[prost(int64, tag = "5")]
    CreateRevision(i64),
    #[prost(bytes, tag = "7")]
    Value(Vec<u8>),
}

/// Does `success` where all of `compare` holds, else `failure`; all of it at one revision.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Transaction {
    #[prost(message, repeated, tag = "1")]
    pub compare: Vec<Compare>,
    #[prost(message, repeated, tag = "2")]
    pub success: Vec<Operation>,
    #[prost(message, repeated, tag = "3")]
    pub failure: Vec<Operation>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct TransactionReply {
    #[prost(message, optional, tag = "1")]
    pub header: Option<Header>,
    #[prost(bool, tag = "2")]
    pub succeeded: bool,
    #[prost(message, repeated, tag = "3")]
    pub responses: Vec<Response>,
}

/// What a step came to; only what was read has more to say.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Response {
    #[prost(message, optional, tag = "1")]
    pub range: Option<RangeReply>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct LeaseGrant {
    /// Seconds.
    #[prost(int64, tag = "1")]
    pub ttl: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct LeaseGrantReply {
    #[prost(int64, tag = "2")]
    pub id: i64,
    #[prost(int64, tag = "3")]
    pub ttl: i64,
}

/// Names a lease, to keep it or to end it.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Lease {
    #[prost(int64, tag = "1")]
    pub id: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct LeaseKept {
    /// Seconds; 0 where the lease is over.
    #[prost(int64, tag = "3")]
    pub ttl: i64,
}

/// An answer of which nothing is looked at.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Done {}
