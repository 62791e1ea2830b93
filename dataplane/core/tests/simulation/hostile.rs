//! Control messages that no honest participant sends.

use super::scenario::{MICROSECOND, MILLISECOND};
use super::world::{Event, Input, World};
use harmonaize_abi::{Collective, Dtype, Epoch, OperationId, Rank, ReduceOp, SegmentId, Signature};
use harmonaize_aggregator::{Agreement, Summation};
use harmonaize_core::{Control, Failure, Header, Kind, MAX_MESSAGE, Message, Payload};
use harmonaize_plan::Participant;
use rand::RngExt;

impl World {
    fn any_number(&mut self) -> u64 {
        match self.rng.random_range(0..3) {
            0 => self.rng.random(),
            1 => u64::MAX - self.rng.random_range(0..3),
            _ => self.rng.random_range(0..6),
        }
    }

    fn any_rank(&mut self) -> Rank {
        Rank(self.any_number() as u32)
    }

    /// Questions, one a microsecond, for whose answers there is no room for a while.
    pub(crate) fn flood(&mut self, from: Participant, to: Participant, questions: u32) {
        let until = self.now + self.rng.random_range(0..20 * MILLISECOND);
        self.nodes[to.0 as usize].stuck_until = until;
        self.at(until, Event::Poll(to));
        let link = self.scenario.plan.epoch;
        for index in 0..questions {
            let (operation, count) = (OperationId(self.any_number()), Some(index));
            let control = Some(Box::new(Control::Inquire { operation, count }));
            let message = Message { header: Header::new(Kind::Control, link), control };
            let mut buffer = [0; MAX_MESSAGE];
            let used = message.encode(&mut buffer);
            let (message, payload) = (buffer[..used].to_vec(), Payload::default());
            let at = self.now + u64::from(index) * MICROSECOND;
            self.at(at, Event::Input(to, Input::Frame { from, link, message, payload }));
        }
    }

    pub(crate) fn any_control(&mut self) -> Control {
        let signature = Signature {
            collective: Collective::AllToAll,
            dtype: Dtype::F64,
            reduce: ReduceOp::Max,
            root: self.any_rank(),
            count: self.any_number(),
            uneven: self.rng.random_bool(0.5),
        };
        let (number, rank) = (self.any_number(), self.any_rank());
        let epoch = Epoch(self.any_number() as u32);
        let missing: Vec<Rank> = (0..self.rng.random_range(0..300)).map(|_| self.any_rank()).collect();
        let (generation, session) = (self.any_number() as u8, self.any_number());
        let way = if self.rng.random_bool(0.5) { Summation::Hosts } else { Summation::Aggregator };
        let agreement = match self.rng.random_range(0..6) {
            0 => Agreement::Ask { session },
            1 => Agreement::Stop { session },
            2 => Agreement::Stopped { session, done: SegmentId(number), done_everywhere: SegmentId(session) },
            3 => Agreement::Resume { session, from: SegmentId(number), summation: way },
            4 => Agreement::Done { session, below: SegmentId(number) },
            _ => Agreement::DoneEverywhere { below: SegmentId(number) },
        };
        match self.rng.random_range(0..10) {
            0 => Control::Inquire {
                operation: OperationId(number),
                count: self.rng.random_bool(0.5).then_some(rank.0),
            },
            1 => {
                let reported = Some((rank, self.any_number()));
                Control::Answer {
                    operation: OperationId(number),
                    count: Some(rank.0),
                    missing,
                    call: Some((rank, signature)),
                    reported,
                }
            }
            2 => Control::Left { rank, operations: number },
            3 => Control::Prepared { epoch },
            4 => Control::Propose { epoch },
            5 => Control::Promise { epoch, below: SegmentId(number) },
            6 => Control::Commit { epoch, segment: SegmentId(number) },
            8 => Control::Aggregation { epoch: Epoch(epoch.0 % 4), generation, agreement },
            7 => {
                let operation = OperationId(number % 4);
                Control::Answer { operation, count: None, missing: Vec::new(), call: None, reported: None }
            }
            _ => Control::Abort { failure: Failure::RanksLost { ranks: missing } },
        }
    }
}
