//! Whether too much is lost on the way: how many of a worker's questions go unanswered.

use std::time::Duration;

/// Questions of a period of which fewer say nothing.
const MIN_SAMPLES: u32 = 64;

/// Questions and answers, period by period. Those of a period are held against the answers of it and of the next, so that what is late is
/// not taken for lost, however much is asked at once; some of these answers are to later questions, so that less is found than there is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Losses {
    /// Of a thousand questions, how many may go unanswered.
    max_permille: u32,
    period: Duration,
    /// When the period began.
    since: Duration,
    before: Period,
    this: Period,
}

#[derive(Clone, Copy, Debug, Default)]
struct Period {
    questions: u32,
    answers: u32,
}

impl Losses {
    pub(crate) fn new(max_permille: u32, period: Duration) -> Self {
        let (before, this) = (Period::default(), Period::default());
        Self { max_permille, period, since: Duration::ZERO, before, this }
    }

    /// Nothing has been asked.
    pub(crate) fn begin(&mut self, now: Duration) {
        *self = Self { since: now, ..Self::new(self.max_permille, self.period) };
    }

    /// A question is asked. Whether too many went unanswered.
    pub(crate) fn record_request(&mut self, now: Duration) -> bool {
        let over = now.saturating_sub(self.since) >= self.period;
        let Period { questions, answers } = self.before;
        if over {
            (self.before, self.since) = (self.this, now);
        }
        let answers = answers.saturating_add(self.this.answers);
        if over {
            self.this = Period::default();
        }
        self.this.questions = self.this.questions.saturating_add(1);
        let unanswered = u64::from(questions.saturating_sub(answers));
        over && questions >= MIN_SAMPLES
            && unanswered * 1000 > u64::from(self.max_permille) * u64::from(questions)
    }

    /// One is answered.
    pub(crate) fn record_answer(&mut self) {
        self.this.answers = self.this.answers.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PERIOD: Duration = Duration::from_millis(150);

    /// Asks every millisecond for so many periods; of `of` questions one is answered, `late` milliseconds after it.
    fn ends(of: usize, late: usize, periods: u32) -> bool {
        let mut losses = Losses::new(900, PERIOD);
        let end = (PERIOD * periods).as_millis() as usize;
        (0..end).any(|at| {
            if at >= late && (at - late).is_multiple_of(of) {
                losses.record_answer();
            }
            losses.record_request(Duration::from_millis(at as u64))
        })
    }

    #[test]
    fn what_is_lost_is_told_from_what_is_late() {
        assert!(ends(100, 0, 4), "one answer of a hundred");
        assert!(!ends(4, 0, 40), "one of four");
        assert!(!ends(1, 140, 40), "all are late");
        assert!(!ends(100, 0, 2), "not before answers have had their time");
    }

    #[test]
    fn few_requests_are_not_judged() {
        let mut losses = Losses::new(900, PERIOD);
        assert!((0..1000_u32).all(|at| !losses.record_request(PERIOD * at / 60)));
    }

    #[test]
    fn a_window_asked_for_waits_for_answers() {
        let mut losses = Losses::new(900, PERIOD);
        let mut now = Duration::ZERO;
        for _ in 0..20 {
            now += PERIOD;
            assert!((0..1024).all(|_| !losses.record_request(now)));
            // Of a period its first question alone has answers of the next.
            (0..1024).for_each(|_| losses.record_answer());
        }
    }
}
