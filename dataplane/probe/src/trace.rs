//! A trace as a state machine: which packet goes when, whose death has been told, what is sent again.

use crate::packet::{MOST, ProbePacket, Protocol, parse_time_exceeded};
use crate::{MAX_HOPS, MAX_PAIRS};
use harmonaize_abi::keyed;
use hmac::Mac;
use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

/// How many packets may be under way at once. Switches report so many deaths in a row and no more.
const WINDOW: usize = 48;
/// How long the first, second, third of a packet's copies may take.
const COPY_TIMEOUTS: [Duration; 3] =
    [Duration::from_millis(40), Duration::from_millis(100), Duration::from_millis(200)];

/// What is to be found out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// What the packets are of.
    pub protocol: Protocol,
    /// Where they come from: an address of this host.
    pub source: Ipv4Addr,
    /// Where they seem to go.
    pub destination: Ipv4Addr,
    /// Source and destination ports; at most [`MAX_PAIRS`] are taken.
    pub pairs: Vec<(u16, u16)>,
    /// The longest time to live; at most [`MAX_HOPS`].
    pub hops: u8,
}

/// The way of packets with two ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracedRoute {
    /// Source and destination port.
    pub ports: (u16, u16),
    /// By time to live from 1: who told of a packet's death; none where nobody did.
    pub hops: Vec<Option<Ipv4Addr>>,
}

#[derive(Debug)]
struct Packet {
    probe: ProbePacket,
    time_to_live: u8,
    copies: usize,
    /// Until when the last copy's death may be told.
    due: Option<Instant>,
    at: Option<Ipv4Addr>,
}

impl Packet {
    fn over(&self) -> bool {
        self.at.is_some() || (self.copies == COPY_TIMEOUTS.len() && self.due.is_none())
    }
}

/// See the module's documentation. Packets that it gives are to be sent, messages that come are to be shown to it.
#[derive(Debug)]
pub struct Trace {
    question: Question,
    packets: Vec<Packet>,
    probes: HashMap<ProbePacket, usize>,
    /// The first packet of which no copy has left.
    next: usize,
}

impl Trace {
    /// A trace whose packets bear tags by this key. Who does not know the key makes up no answer, though he has seen all packets but one.
    pub fn new(question: Question, key: &[u8; 32]) -> Self {
        let Question { protocol, source, destination, .. } = question;
        let mut packets = Vec::new();
        let mut number = 0;
        let mut probes = HashMap::new();
        for ports in question.pairs.iter().take(MAX_PAIRS) {
            for time_to_live in 1..=question.hops.min(MAX_HOPS) {
                let token = loop {
                    number += 1;
                    let token = tag(key, number);
                    let doomed = ProbePacket { protocol, source, destination, ports: *ports, token }.sound();
                    if !probes.contains_key(&doomed) {
                        break doomed.token;
                    }
                };
                let doomed = ProbePacket { protocol, source, destination, ports: *ports, token };
                probes.insert(doomed, packets.len());
                packets.push(Packet { probe: doomed, time_to_live, copies: 0, due: None, at: None });
            }
        }
        Self { question, packets, probes, next: 0 }
    }

    /// The next packet to send, if one may go now; its bytes.
    pub fn poll(&mut self, now: Instant) -> Option<Vec<u8>> {
        self.give_up(now);
        let late = self.packets.iter().take(self.next).position(|packet| {
            packet.at.is_none()
                && packet.due.is_some_and(|due| due <= now)
                && packet.copies < COPY_TIMEOUTS.len()
        });
        let flying = self.packets.iter().filter(|packet| packet.at.is_none() && packet.due.is_some());
        let at = match late {
            Some(at) => at,
            None if flying.count() < WINDOW && self.next < self.packets.len() => {
                self.next += 1;
                self.next - 1
            }
            None => return None,
        };
        let packet = self.packets.get_mut(at)?;
        packet.due = COPY_TIMEOUTS.get(packet.copies).map(|patience| now + *patience);
        packet.copies += 1;
        let mut buffer = [0; MOST];
        let length = packet.probe.write(packet.time_to_live, &mut buffer);
        buffer.get(..length).map(<[u8]>::to_vec)
    }

    /// Packets of which the last copy is late have no place among those on their way any more.
    fn give_up(&mut self, now: Instant) {
        for packet in &mut self.packets {
            packet.due = packet.due.filter(|due| *due > now || packet.copies < COPY_TIMEOUTS.len());
        }
    }

    /// A message of ICMP came, with its IP header. True if it told of one of the packets for the first time.
    pub fn handle_icmp(&mut self, message: &[u8]) -> bool {
        let Some((at, doomed)) = parse_time_exceeded(message) else { return false };
        let packet = self.probes.get(&doomed).and_then(|at| self.packets.get_mut(*at));
        let Some(packet) = packet.filter(|packet| packet.copies > 0 && packet.at.is_none()) else {
            return false;
        };
        packet.at = Some(at);
        true
    }

    /// When [`Trace::poll`] may next have something, if nothing is heard before.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.packets.iter().filter(|packet| packet.at.is_none()).filter_map(|packet| packet.due).min()
    }

    /// Whether nothing more is to be sent or waited for.
    pub fn is_over(&self) -> bool {
        self.packets.iter().all(Packet::over)
    }

    /// What was found so far, a way for each pair of ports.
    pub fn found(&self) -> Vec<TracedRoute> {
        let hops = usize::from(self.question.hops.min(MAX_HOPS));
        if hops == 0 {
            return self
                .question
                .pairs
                .iter()
                .map(|ports| TracedRoute { ports: *ports, hops: Vec::new() })
                .collect();
        }
        let ways = self.packets.chunks(hops).zip(&self.question.pairs);
        ways.map(|(packets, ports)| TracedRoute {
            ports: *ports,
            hops: packets.iter().map(|packet| packet.at).collect(),
        })
        .collect()
    }
}

/// The tag of a packet of a trace: HMAC-SHA256, cut.
fn tag(key: &[u8; 32], number: u32) -> u32 {
    let mut mac = keyed(key);
    mac.update(&number.to_le_bytes());
    mac.finalize().into_bytes().first_chunk().map_or(0, |first| u32::from_le_bytes(*first))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAF: Ipv4Addr = Ipv4Addr::new(10, 64, 0, 3);

    fn question(pairs: u16, hops: u8) -> Question {
        Question {
            protocol: Protocol::Tcp,
            source: Ipv4Addr::new(10, 64, 0, 2),
            destination: Ipv4Addr::new(10, 64, 0, 9),
            pairs: (0..pairs).map(|port| (40_000 + port, 7100)).collect(),
            hops,
        }
    }

    /// What the switch that a packet dies at says: the second is chosen by the source port.
    fn obituary(packet: &[u8]) -> Vec<u8> {
        let port = u16::from_be_bytes([packet[20], packet[21]]);
        let at = match packet[8] {
            1 => LEAF,
            2 => Ipv4Addr::new(10, 64, 1, (port % 2) as u8),
            _ => Ipv4Addr::new(10, 64, 2, 1),
        };
        let mut message = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, 1, 0, 0];
        message.extend(at.octets());
        message.extend([10, 64, 0, 2, 11, 0, 0, 0, 0, 0, 0, 0]);
        message.extend(&packet[..28]);
        message
    }

    #[test]
    fn a_fabric_that_answers_is_traced_with_one_packet_each() {
        let (mut trace, now) = (Trace::new(question(64, 3), &[1; 32]), Instant::now());
        let mut sent = 0;
        while let Some(packet) = trace.poll(now) {
            sent += 1;
            assert!(trace.handle_icmp(&obituary(&packet)));
            assert!(!trace.handle_icmp(&obituary(&packet)), "it dies but once");
        }
        assert!(sent == 64 * 3 && trace.is_over());
        for (at, way) in trace.found().into_iter().enumerate() {
            assert_eq!(way.ports, (40_000 + at as u16, 7100));
            let spine = Ipv4Addr::new(10, 64, 1, (at % 2) as u8);
            assert_eq!(way.hops, [Some(LEAF), Some(spine), Some(Ipv4Addr::new(10, 64, 2, 1))]);
        }
    }

    #[test]
    fn lost_packets_are_repeated_and_silent_switches_omitted() {
        let (mut trace, mut now) = (Trace::new(question(16, 3), &[2; 32]), Instant::now());
        let begun = now;
        let (mut sent, mut flying) = (0, 0);
        while !trace.is_over() {
            while let Some(packet) = trace.poll(now) {
                sent += 1;
                flying += 1;
                assert!(flying <= 2 * WINDOW);
                // The first copy of all is lost, and the second switch never answers.
                if packet[8] != 2 && now > begun {
                    assert!(trace.handle_icmp(&obituary(&packet)));
                }
            }
            flying = 0;
            let Some(due) = trace.poll_timeout() else { continue };
            assert!(due > now, "time stands still");
            now = due;
        }
        assert_eq!(sent, 16 * (2 + 3 + 2));
        assert!(now - begun < Duration::from_millis(700), "{:?}", now - begun);
        assert!(trace.found().iter().all(|way| way.hops[1].is_none() && way.hops[0] == Some(LEAF)));
    }

    #[test]
    fn who_was_not_asked_is_not_believed() {
        let (mut trace, now) = (Trace::new(question(1, 2), &[3; 32]), Instant::now());
        let packet = trace.poll(now).unwrap();
        for byte in 0..32 {
            let mut key = [3; 32];
            key[byte] ^= 1;
            let other = Trace::new(question(1, 2), &key).poll(now).unwrap();
            assert!(!trace.handle_icmp(&obituary(&other)), "by a key that differs in byte {byte}");
        }
        for at in [12, 16, 20, 22, 24, 27] {
            let mut changed = packet.clone();
            changed[at] ^= 1;
            assert!(!trace.handle_icmp(&obituary(&changed)), "byte {at}");
        }
        assert!(!trace.handle_icmp(&[]) && trace.handle_icmp(&obituary(&packet)));
    }

    #[test]
    fn tags_of_other_packets_prove_nothing() {
        let (mut trace, now) = (Trace::new(question(40, 1), &[5; 32]), Instant::now());
        let packets: Vec<_> = std::iter::from_fn(|| trace.poll(now)).collect();
        let sequence = 24..28;
        for (at, packet) in packets.iter().enumerate() {
            for other in packets.iter().enumerate().filter(|(other, _)| *other != at) {
                let mut forged = packet.clone();
                forged[sequence.clone()].copy_from_slice(&other.1[sequence.clone()]);
                assert!(!trace.handle_icmp(&obituary(&forged)), "packet {at} by the tag of {}", other.0);
            }
        }
        assert!(packets.iter().all(|packet| trace.handle_icmp(&obituary(packet))));
    }

    #[test]
    fn more_than_may_be_asked_is_left_out() {
        let trace = Trace::new(question(1000, 255), &[5; 32]);
        assert_eq!(trace.packets.len(), MAX_PAIRS * usize::from(MAX_HOPS));
        let mut none = Trace::new(question(3, 0), &[6; 32]);
        assert!(none.is_over() && none.poll(Instant::now()).is_none() && none.poll_timeout().is_none());
        assert!(none.found().len() == 3 && Trace::new(question(0, 3), &[7; 32]).is_over());
    }
}
