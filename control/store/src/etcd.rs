//! A store in etcd, which several controls share: one leads and writes, the others follow.
//!
//! Records lie under one prefix, encoded as in a file. A leader's record lives by its lease ([`Election`]). Each transaction of
//! a leader asks that this record is still its own, and that its last write is the last of all: what another control
//! has followed, or what is late, changes nothing.

mod client;
mod election;
mod wire;

pub use client::Members;
pub use election::{Election, Reader, Role, Term};

use crate::record::{Job, Tenant, Withdrawal, WithdrawalKind};
use crate::{Change, Damage, Store, StoreError, Stored};
use client::Client;
use harmonaize_abi::CommunicatorId;
use prost::Message;
use std::collections::BTreeMap;
use std::path::PathBuf;
use tonic::Status;
use wire::{Compare, Delete, KeyValue, Operation, Put, Range, Step, Transaction, TransactionReply, Wanted};

/// How records lie in etcd.
const FORMAT: u32 = 1;
/// Before all keys.
const PREFIX: &str = "/harmonaize/";
/// The first key that is not below the prefix.
const BEHIND: &str = "/harmonaize0";
const FORMAT_KEY: &str = "/harmonaize/format";
/// Has the leader's name, and its lease.
const LEADER: &str = "/harmonaize/leader";
/// Tells the last write from all others.
const WRITTEN: &str = "/harmonaize/written";

/// Most records of a transaction, beside its own: etcd takes 128 operations unless it is told otherwise.
const MOST_RECORDS: usize = 120;
/// Most bytes of a transaction's records: etcd takes 1.5 MiB.
const MOST_BYTES: usize = 1 << 20;

/// The store of a leader, for its term. Groups of up to 120 records and 1 MiB are one transaction; larger ones are several,
/// and a failure may leave the first of them.
#[derive(Debug)]
pub struct Etcd {
    client: Client,
    term: Term,
    /// The number of the last write that is known to be carried out.
    written: u64,
    /// The number of the last that was begun.
    begun: u64,
}

impl Etcd {
    fn new(client: Client, term: Term) -> Self {
        Self { client, term, written: 0, begun: 0 }
    }

    /// Writes a group as one transaction.
    async fn commit(&mut self, group: Vec<Operation>) -> Result<(), StoreError> {
        self.begun += 1;
        let number = self.begun;
        loop {
            let mark = |number| mark(self.term.lease, number);
            let mut success = vec![put(WRITTEN, mark(number), 0)];
            success.extend(group.iter().cloned());
            let compare = vec![created(LEADER, self.term.revision), equals(WRITTEN, mark(self.written))];
            let failure = vec![get(LEADER), get(WRITTEN)];
            let transaction = Transaction { compare, success, failure };
            let reply = self.client.transact(transaction).await.map_err(|status| silent(&status))?;
            let leads = find(&reply, 0).is_some_and(|leader| leader.create_revision == self.term.revision);
            let last = find(&reply, 1).map(|last| last.value.as_slice());
            // One of this term's that was carried out though nobody heard of it.
            let unheard = (self.written + 1..=number).find(|number| last == Some(mark(*number).as_slice()));
            self.written = match unheard {
                _ if reply.succeeded => number,
                Some(unheard) if leads => unheard,
                _ => return Err(StoreError::Superseded),
            };
            if self.written == number {
                return Ok(());
            }
        }
    }
}

impl Store for Etcd {
    fn read(&self) -> Result<Stored, StoreError> {
        self.client.runtime().block_on(read(&self.client))
    }

    fn write(&mut self, changes: &[Change]) -> Result<(), StoreError> {
        let runtime = self.client.runtime().clone();
        groups(changes).into_iter().try_for_each(|group| runtime.block_on(self.commit(group)))
    }
}

/// The changes as operations, the last of each record alone, in groups of a transaction each.
fn groups(changes: &[Change]) -> Vec<Vec<Operation>> {
    let last: BTreeMap<String, Option<Vec<u8>>> = changes.iter().map(record).collect();
    let (mut groups, mut bytes) = (vec![Vec::new()], 0);
    for (key, value) in last {
        let more = key.len() + value.as_ref().map_or(0, Vec::len);
        let full = |group: &Vec<Operation>| {
            group.len() >= MOST_RECORDS || !group.is_empty() && bytes + more > MOST_BYTES
        };
        if groups.last().is_none_or(full) {
            groups.push(Vec::new());
            bytes = 0;
        }
        bytes += more;
        if let Some(group) = groups.last_mut() {
            group.push(match value {
                Some(value) => put(&key, value, 0),
                None => Operation { step: Some(Step::Delete(Delete { key: key.into() })) },
            });
        }
    }
    groups
}

/// A change's key, and what lies there then.
fn record(change: &Change) -> (String, Option<Vec<u8>>) {
    let numbered = |kind: &str, id: u64| format!("{PREFIX}{kind}/{id:016x}");
    let withdrawal =
        |target: &str, kind: WithdrawalKind| format!("{PREFIX}withdrawals/{}/{target}", kind as i32);
    let tenant = |name: &str| format!("{PREFIX}tenants/{name}");
    // Names of tenants have no slash.
    let job = |tenant: &str, name: &str| format!("{PREFIX}jobs/{tenant}/{name}");
    match change {
        Change::Boot(boot) => (format!("{PREFIX}boot"), Some(boot.to_string().into_bytes())),
        Change::Fabric(fabric) => (format!("{PREFIX}fabric"), Some(fabric.encode_to_vec())),
        Change::Tenant(record) => (tenant(&record.name), Some(record.encode_to_vec())),
        Change::NoTenant(name) => (tenant(name), None),
        Change::Withdraw(record) => (withdrawal(&record.target, record.kind()), Some(record.encode_to_vec())),
        Change::Restore(target, kind) => (withdrawal(target, *kind), None),
        Change::Plan(plan) => (numbered("plans", plan.communicator), Some(plan.encode_to_vec())),
        Change::NoPlan(id) => (numbered("plans", id.0), None),
        Change::Agreement(record) => {
            (numbered("agreements", record.communicator), Some(record.encode_to_vec()))
        }
        Change::NoAgreement(id) => (numbered("agreements", id.0), None),
        Change::Past(past) => (numbered("pasts", past.communicator), Some(past.encode_to_vec())),
        Change::NoPast(id) => (numbered("pasts", id.0), None),
        Change::Job(record) => (job(&record.tenant, &record.name), Some(record.encode_to_vec())),
        Change::NoJob(tenant, name) => (job(tenant, name), None),
    }
}

/// All records, as they are at one revision.
async fn read(client: &Client) -> Result<Stored, StoreError> {
    let all = Range { key: PREFIX.into(), range_end: BEHIND.into() };
    let found = client.range(all).await.map_err(|status| silent(&status))?;
    let mut stored = Stored::default();
    for found in &found.kvs {
        take(&mut stored, found)?;
    }
    Ok(stored)
}

/// Takes in a record. Keys of a later version's are passed over; what can be read by that version alone has another format.
fn take(stored: &mut Stored, found: &KeyValue) -> Result<(), StoreError> {
    let key = String::from_utf8_lossy(&found.key);
    let wrong = || damaged(&key);
    let value = found.value.as_slice();
    fn decoded<T: Message + Default>(value: &[u8], key: &str) -> Result<T, StoreError> {
        T::decode(value).map_err(|_| damaged(key))
    }
    let id = |id: &str| u64::from_str_radix(id, 16).map(CommunicatorId).map_err(|_| wrong());
    let path = key.strip_prefix(PREFIX).unwrap_or_default();
    match path.split_once('/').unwrap_or((path, "")) {
        ("format", _) => check_format(Some(found))?,
        ("boot", _) => {
            let boot = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
            stored.boot = Some(boot.ok_or_else(wrong)?);
        }
        ("fabric", _) => stored.fabric = Some(decoded(value, &key)?),
        ("tenants", name) => {
            stored.tenants.insert(name.to_owned(), decoded::<Tenant>(value, &key)?);
        }
        ("withdrawals", which) => {
            let (kind, target) = which.split_once('/').ok_or_else(wrong)?;
            let kind = kind.parse().ok().and_then(|kind: i32| WithdrawalKind::try_from(kind).ok());
            let key_of = (target.to_owned(), kind.ok_or_else(wrong)?);
            stored.withdrawals.insert(key_of, decoded::<Withdrawal>(value, &key)?);
        }
        ("plans", plan) => drop(stored.plans.insert(id(plan)?, decoded(value, &key)?)),
        ("agreements", one) => drop(stored.agreements.insert(id(one)?, decoded(value, &key)?)),
        ("pasts", past) => drop(stored.pasts.insert(id(past)?, decoded(value, &key)?)),
        ("jobs", which) => {
            let (tenant, name) = which.split_once('/').ok_or_else(wrong)?;
            stored.jobs.insert((tenant.to_owned(), name.to_owned()), decoded::<Job>(value, &key)?);
        }
        _ => {}
    }
    Ok(())
}

/// Whether this control knows the format; there is none before the first leader.
fn check_format(found: Option<&KeyValue>) -> Result<(), StoreError> {
    let Some(found) = found else { return Ok(()) };
    let format = std::str::from_utf8(&found.value).ok().and_then(|text| text.parse().ok());
    match format {
        Some(FORMAT) => Ok(()),
        Some(found) if found > FORMAT => {
            Err(StoreError::Format { path: PathBuf::from(FORMAT_KEY), found, supported: FORMAT })
        }
        _ => Err(damaged(FORMAT_KEY)),
    }
}

/// What a write by this lease leaves behind.
fn mark(lease: i64, number: u64) -> Vec<u8> {
    format!("{lease:x}:{number}").into_bytes()
}

fn put(key: &str, value: Vec<u8>, lease: i64) -> Operation {
    Operation { step: Some(Step::Put(Put { key: key.into(), value, lease })) }
}

fn get(key: &str) -> Operation {
    Operation { step: Some(Step::Range(Range { key: key.into(), range_end: Vec::new() })) }
}

/// The record was made at this revision; 0 for that there is none.
fn created(key: &str, revision: i64) -> Compare {
    Compare { target: 1, key: key.into(), wanted: Some(Wanted::CreateRevision(revision)) }
}

fn equals(key: &str, value: Vec<u8>) -> Compare {
    Compare { target: 3, key: key.into(), wanted: Some(Wanted::Value(value)) }
}

/// The record that a transaction's step has read.
fn find(reply: &TransactionReply, step: usize) -> Option<&KeyValue> {
    reply.responses.get(step)?.range.as_ref()?.kvs.first()
}

fn silent(status: &Status) -> StoreError {
    failed(&status.message())
}

fn failed(error: &dyn std::fmt::Display) -> StoreError {
    StoreError::Failed { path: "etcd".into(), why: error.to_string() }
}

fn damaged(key: &str) -> StoreError {
    StoreError::Damaged { path: key.into(), why: Damage::NoRecord }
}
