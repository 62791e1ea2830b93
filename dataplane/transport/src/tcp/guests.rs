//! Connections that have proved nothing yet: a bounded number of all, and of each address.

use super::incoming::Incoming;
use std::collections::HashMap;
use std::net::IpAddr;

/// The places of guests.
#[derive(Debug)]
pub(super) struct Guests {
    places: Vec<Option<Incoming>>,
    /// Most of one address.
    each: usize,
    of: HashMap<IpAddr, usize>,
}

impl Guests {
    /// Room for so many of all addresses and of each, at least one.
    pub(super) fn new(all: u16, each: u16) -> Self {
        let places = (0..all.max(1)).map(|_| None).collect();
        Self { places, each: each.max(1).into(), of: HashMap::new() }
    }

    /// Where a guest of `from` goes, from which the one who has been there goes. An address at its bound loses its oldest; where
    /// all places are taken, the address with the most does.
    pub(super) fn make_room(&mut self, from: IpAddr) -> Option<usize> {
        let own = self.of.get(&from).copied().unwrap_or(0);
        let free = || self.places.iter().position(Option::is_none);
        let at = if own >= self.each {
            self.oldest(from)
        } else {
            free().or_else(|| {
                let most = self.of.iter().max_by_key(|(address, count)| (**count, **address))?;
                // Of two with as many the newcomer's gives way.
                self.oldest(if *most.1 == own { from } else { *most.0 })
            })
        }?;
        self.remove(at);
        Some(at)
    }

    fn oldest(&self, from: IpAddr) -> Option<usize> {
        let of = |(at, place): (usize, &Option<Incoming>)| {
            place.as_ref().filter(|guest| guest.from == from).map(|guest| (guest.serial, at))
        };
        self.places.iter().enumerate().filter_map(of).min().map(|(_, at)| at)
    }

    /// Puts a guest where [`Guests::make_room`] said.
    pub(super) fn put(&mut self, at: usize, guest: Incoming) {
        if let Some(place) = self.places.get_mut(at) {
            *self.of.entry(guest.from).or_default() += 1;
            *place = Some(guest);
        }
    }

    /// The guest at a place, if it is still the one of this number.
    pub(super) fn get(&mut self, at: usize, serial: u64) -> Option<&mut Incoming> {
        self.places.get_mut(at)?.as_mut().filter(|guest| guest.serial == serial)
    }

    pub(super) fn remove(&mut self, at: usize) -> Option<Incoming> {
        let guest = self.places.get_mut(at)?.take()?;
        if let Some(count) = self.of.get_mut(&guest.from) {
            *count -= 1;
            if *count == 0 {
                self.of.remove(&guest.from);
            }
        }
        Some(guest)
    }

    /// All of them with their places.
    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, &Incoming)> {
        self.places.iter().enumerate().filter_map(|(at, guest)| Some((at, guest.as_ref()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use socket2::{Domain, Socket, Type};
    use std::time::Instant;

    /// A guest of 10.0.0.`from`; says the number of the one who had to go.
    fn come(guests: &mut Guests, serial: u64, from: u8) -> Option<u64> {
        let from = IpAddr::from([10, 0, 0, from]);
        let before: Vec<u64> = guests.iter().map(|(_, guest)| guest.serial).collect();
        let at = guests.make_room(from).unwrap();
        let left: Vec<u64> = guests.iter().map(|(_, guest)| guest.serial).collect();
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        guests.put(at, Incoming::new(socket, from, serial, Instant::now()));
        before.into_iter().find(|serial| !left.contains(serial))
    }

    #[test]
    fn an_address_at_its_bound_loses_its_own_oldest() {
        let mut guests = Guests::new(8, 2);
        let gone: Vec<_> =
            (0..5).map(|serial| come(&mut guests, serial, if serial == 0 { 1 } else { 2 })).collect();
        assert_eq!(gone, [None, None, None, Some(1), Some(2)]);
    }

    #[test]
    fn without_room_the_address_with_the_most_loses_its_oldest() {
        let mut guests = Guests::new(4, 4);
        for (serial, from, gone) in [
            (0, 1, None),
            (1, 2, None),
            (2, 2, None),
            (3, 2, None),
            (4, 1, Some(1)),
            (5, 3, Some(2)),
            (6, 3, Some(0)),
        ] {
            assert_eq!(come(&mut guests, serial, from), gone, "guest {serial}");
        }
        let at = guests.iter().next().unwrap().0;
        let serial = guests.remove(at).unwrap().serial;
        assert!(guests.get(at, serial).is_none() && come(&mut guests, 7, 9).is_none());
    }
}
