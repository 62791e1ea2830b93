//! What the ports of a big switch have free, and max-min fair shares of it.

/// A number for each port's two directions.
#[derive(Clone, Debug)]
pub(super) struct Ports {
    /// Sending first, then receiving.
    each: Vec<f64>,
}

impl Ports {
    /// The same for all.
    pub(super) fn all(ports: usize, value: f64) -> Self {
        Self { each: vec![value; 2 * ports] }
    }

    fn at(&self, place: usize) -> f64 {
        self.each.get(place).copied().unwrap_or(0.0)
    }

    fn add(&mut self, place: usize, value: f64) {
        if let Some(own) = self.each.get_mut(place) {
            *own += value;
        }
    }

    fn places(&self, (from, to): (usize, usize)) -> [usize; 2] {
        [from, self.each.len() / 2 + to]
    }

    /// The smaller of what one port has for sending and another for receiving.
    pub(super) fn least(&self, ends: (usize, usize)) -> f64 {
        let [from, to] = self.places(ends);
        self.at(from).min(self.at(to))
    }

    /// Adds to what one port has for sending and another for receiving.
    pub(super) fn add_both(&mut self, ends: (usize, usize), value: f64) {
        self.places(ends).into_iter().for_each(|place| self.add(place, value));
    }

    /// Takes that from both; nothing is less than nothing.
    pub(super) fn take_both(&mut self, ends: (usize, usize), value: f64) {
        for place in self.places(ends) {
            if let Some(own) = self.each.get_mut(place) {
                *own = (*own - value).max(0.0);
            }
        }
    }

    /// The values, of sending first.
    pub(super) fn each(&self) -> impl Iterator<Item = f64> + '_ {
        self.each.iter().copied()
    }

    /// The most of any.
    pub(super) fn max(&self) -> f64 {
        self.each().fold(0.0, f64::max)
    }

    /// The values beside those of another, both directions of each port.
    pub(super) fn beside<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = (f64, f64)> + 'a {
        self.each().zip(other.each())
    }
}

/// Equal flows between two ports.
#[derive(Clone, Copy, Debug)]
pub(super) struct Class {
    /// The port that sends and the one that receives.
    pub ends: (usize, usize),
    /// How many flows.
    pub flows: f64,
}

/// Gives each flow its max-min fair share of what is free, and takes all of it from there. `rates`: of one flow, by class.
///
/// By progressive filling: the port that has least for each of its flows is full first; those flows have their rate then, and the others
/// share what they leave.
pub(super) fn max_min(free: &mut Ports, classes: &[Class], rates: &mut Vec<f64>) {
    let places = free.each.len();
    rates.clear();
    rates.resize(classes.len(), f64::NAN);
    // By place: where the classes that cross it stand in `members`.
    let mut ends = vec![0_usize; places + 1];
    let mut waiting = Ports { each: vec![0.0; places] };
    let crosses = |class: &Class| [class.ends.0, places / 2 + class.ends.1];
    for class in classes {
        for place in crosses(class) {
            waiting.add(place, class.flows);
            if let Some(end) = ends.get_mut(place) {
                *end += 1;
            }
        }
    }
    let mut sum = 0;
    for end in &mut ends {
        sum += *end;
        *end = sum;
    }
    let mut members = vec![0_usize; 2 * classes.len()];
    for (index, class) in classes.iter().enumerate() {
        for place in crosses(class) {
            if let Some(end) = ends.get_mut(place) {
                *end -= 1;
                if let Some(member) = members.get_mut(*end) {
                    *member = index;
                }
            }
        }
    }
    // `ends` are beginnings now.
    let mut open: Vec<usize> = (0..places).filter(|place| waiting.at(*place) > 0.0).collect();
    loop {
        let share = |place: &usize| free.at(*place) / waiting.at(*place);
        let fullest = open.iter().enumerate().map(|(index, place)| (share(place), index, *place));
        let Some((share, index, place)) = fullest.min_by(|one, other| one.0.total_cmp(&other.0)) else {
            break;
        };
        open.swap_remove(index);
        let range = ends.get(place).copied().unwrap_or(0)..ends.get(place + 1).copied().unwrap_or(0);
        for member in members.get(range).into_iter().flatten() {
            let (Some(class), Some(rate)) = (classes.get(*member), rates.get_mut(*member)) else { continue };
            if !rate.is_nan() {
                continue;
            }
            *rate = share;
            free.take_both(class.ends, share * class.flows);
            crosses(class).into_iter().for_each(|place| waiting.add(place, -class.flows));
        }
        open.retain(|place| waiting.at(*place) > 0.5);
    }
}
