//! Asks a service for the figures of all groups and members.

use crate::block::Samples;
use crate::fields::{Figure, OF_GROUP, OF_MEMBER};
use anyhow::Context;
use api::client::Service;
use api::control::MemberReport;
use api::place::Place;
use std::collections::BTreeMap;

/// Most members of a group of which figures are kept.
pub const MOST_MEMBERS: usize = 1000;
/// A group whose worker did not answer is left out for 6 samples, because asking about it may take up to ten seconds.
const LEFT_OUT: u32 = 6;

/// Figures of one moment: group, member ('' for the group itself), and a value for each figure in `fields`.
pub type Sampled = Vec<(String, String, Samples)>;

/// Asks a service again and again.
pub struct Sampler {
    place: Place,
    /// Groups that are left out, and for how many further samples.
    silent: BTreeMap<String, u32>,
}

fn values<T>(figures: &[Figure<T>], facts: &T) -> Samples {
    figures.iter().map(|figure| (figure.of)(facts)).collect()
}

impl Sampler {
    /// Asks the service of this place.
    pub const fn new(place: Place) -> Self {
        Self { place, silent: BTreeMap::new() }
    }

    /// The figures of all groups whose workers answer.
    ///
    /// # Errors
    /// The service does not answer.
    pub fn sample(&mut self) -> anyhow::Result<Sampled> {
        let service = Service::connect_soon(&self.place)?;
        let mut sampled = Sampled::new();
        for line in service.groups().context("the service does not answer")? {
            if let Some(looks) = self.silent.get_mut(&line.name).filter(|looks| **looks > 0) {
                *looks -= 1;
                continue;
            }
            let Ok(state) = service.show(&line.name) else {
                self.silent.insert(line.name, LEFT_OUT);
                continue;
            };
            self.silent.remove(&line.name);
            let savings = state.report.savings;
            let connected = state.report.members.iter().filter(|member| member.connected);
            for member in connected.take(MOST_MEMBERS) {
                let saved_bytes = savings.of_member(member.folded_pages, member.zero_pages, member.vmas);
                let member = MemberReport { saved_bytes, ..member.clone() };
                sampled.push((state.name.clone(), member.name.clone(), values(&OF_MEMBER, &member)));
            }
            sampled.push((state.name.clone(), String::new(), values(&OF_GROUP, &state)));
        }
        Ok(sampled)
    }
}
