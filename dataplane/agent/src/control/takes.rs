//! What control takes in a session beside what every control does: an older one would end the session for the rest.

use harmonaize_api::v1::{self, from_agent, to_agent};

/// See the module's documentation. Nothing before control has said what it takes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Takes {
    telemetry: bool,
    verdicts: bool,
    /// Answers about paths go to who asked, in the session in which it asked.
    paths: bool,
    /// Where they are not taken, operations stay exact, which is within any.
    pub(super) budgets: bool,
    events: bool,
    agreements: bool,
    hints: bool,
    /// It gives turns.
    turns: bool,
}

impl Takes {
    /// What control says of itself.
    pub(super) fn welcome(&mut self, welcome: &v1::Welcome) {
        self.telemetry = welcome.telemetry_interval_ns > 0;
        self.verdicts = welcome.path_verdicts_per_second > 0;
        self.budgets = welcome.budgets;
        self.events = welcome.events;
        self.agreements = welcome.agreements;
        self.hints = welcome.hints;
    }

    /// Control has asked something.
    pub(super) fn asked(&mut self, message: &to_agent::Message) {
        self.turns |= matches!(message, to_agent::Message::Turns(_));
        self.paths |= matches!(message, to_agent::Message::TracePaths(_) | to_agent::Message::ProbePath(_));
    }

    /// Whether it may be said to this control.
    pub(super) fn takes(&self, message: &from_agent::Message) -> bool {
        match message {
            from_agent::Message::Telemetry(_) => self.telemetry,
            from_agent::Message::PathCongestion(_) => self.verdicts,
            from_agent::Message::PathsTraced(_) | from_agent::Message::PathProbed(_) => self.paths,
            from_agent::Message::SetBudget(_) => self.budgets,
            from_agent::Message::ReadEvents(_) => self.events,
            from_agent::Message::Negotiate(_) | from_agent::Message::BeginIteration(_) => self.agreements,
            from_agent::Message::Hint(_) => self.hints,
            from_agent::Message::TurnWanted(_) | from_agent::Message::TurnDone(_) => self.turns,
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_are_asked_of_who_gives_them() {
        let mut takes = Takes::default();
        let wanted = from_agent::Message::TurnWanted(v1::TurnWanted { communicator: 1, turn: 0 });
        takes.welcome(&v1::Welcome::default());
        assert!(!takes.takes(&wanted), "an older control would end the session");
        takes.asked(&to_agent::Message::Turns(v1::Turns { communicator: 1, ..v1::Turns::default() }));
        assert!(takes.takes(&wanted));
    }
}
