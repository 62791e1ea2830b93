//! Questions of one kind, and who waits for which answer.

use harmonaize_abi::session::Refusal;
use std::collections::BTreeMap;
use tokio::sync::oneshot;

/// Where an answer goes, or why there is none. Dropped where control cannot be asked, or does not answer any more.
pub(super) type Reply<T> = oneshot::Sender<Result<T, Refusal>>;

/// Questions of one kind.
#[derive(Debug)]
pub(super) struct PendingRequests<T> {
    /// Whether control is there and takes them.
    available: bool,
    waiting: BTreeMap<u64, Reply<T>>,
    next: u64,
}

impl<T> Default for PendingRequests<T> {
    fn default() -> Self {
        Self { available: false, waiting: BTreeMap::new(), next: 0 }
    }
}

impl<T> PendingRequests<T> {
    /// The number of a question, if it can be asked.
    pub(super) fn ask(&mut self, reply: Reply<T>) -> Option<u64> {
        if !self.available {
            return None;
        }
        let request = self.next;
        self.next += 1;
        self.waiting.insert(request, reply);
        Some(request)
    }

    /// The numbers of questions whose askers went away meanwhile. They wait no longer.
    pub(super) fn abandoned(&mut self) -> Vec<u64> {
        let gone = self.waiting.extract_if(.., |_, reply| reply.is_closed());
        gone.map(|(request, _)| request).collect()
    }

    /// Control's answer.
    pub(super) fn answer(&mut self, request: u64, answer: Result<T, Refusal>) {
        if let Some(reply) = self.waiting.remove(&request) {
            // Nobody hears it if the process went away.
            let _ = reply.send(answer);
        }
    }

    /// A session with control has begun, or ended. What was asked in the one before is answered by nobody else.
    pub(super) fn reset(&mut self, there: bool) {
        self.available = there;
        self.waiting.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_went_away_waits_no_longer() {
        let mut asked = PendingRequests::<u32>::default();
        asked.reset(true);
        let ((reply, answer), (other, waits)) = (oneshot::channel(), oneshot::channel());
        let request = asked.ask(reply).unwrap();
        asked.ask(other).unwrap();
        assert!(asked.abandoned().is_empty());
        drop(answer);
        assert_eq!((asked.abandoned(), asked.abandoned()), (vec![request], vec![]));
        drop(waits);
    }

    #[test]
    fn who_asks_is_answered_whatever_becomes_of_control() {
        let mut asked = PendingRequests::<u32>::default();
        let ask = |asked: &mut PendingRequests<u32>| {
            let (reply, answer) = oneshot::channel();
            (asked.ask(reply), answer)
        };
        let (none, mut answer) = ask(&mut asked);
        assert!(none.is_none() && answer.try_recv().is_err());
        asked.reset(true);
        let (first, mut answer) = ask(&mut asked);
        let (second, mut late) = ask(&mut asked);
        assert_ne!(first, second);
        asked.answer(first.unwrap(), Ok(5));
        assert_eq!(answer.try_recv().unwrap(), Ok(5));
        // An answer that nobody waits for, and one that comes in no session any more.
        asked.answer(99, Ok(1));
        asked.reset(false);
        assert_eq!(late.try_recv(), Err(oneshot::error::TryRecvError::Closed));
        asked.reset(true);
        let (third, mut refused) = ask(&mut asked);
        asked.answer(third.unwrap(), Err("no".into()));
        assert_eq!(refused.try_recv().unwrap(), Err("no".into()));
        asked.answer(second.unwrap(), Ok(1));
    }
}
