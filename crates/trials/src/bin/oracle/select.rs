//! Selection of operations, and of the ways to make them.

use crate::ops::{self, OPERATIONS};
use crate::sys::Way;

/// Classes of operations, which can be left out one by one. Reading and writing always goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    Access,
    Discard,
    Mapping,
    Protect,
    Lock,
    Advise,
    Fork,
    Brk,
    Uffd,
}

const NAMES: [&str; 9] = ["access", "discard", "mapping", "protect", "lock", "advise", "fork", "brk", "uffd"];

/// One word of `--only` or `--without`: a class or operation, a way, or both.
#[derive(Clone, Copy, Debug)]
pub struct Term {
    what: Option<What>,
    way: Option<Way>,
}

#[derive(Clone, Copy, Debug)]
enum What {
    Class(usize),
    Operation(usize),
}

impl Term {
    fn meets(&self, operation: usize, way: Way) -> bool {
        let meets = |what| match what {
            What::Class(class) => OPERATIONS[operation].class as usize == class,
            What::Operation(n) => n == operation,
        };
        self.what.is_none_or(meets) && self.way.is_none_or(|w| w == way)
    }
}

/// Parses a word of `--only` or `--without`.
pub fn parse(text: &str) -> Result<Term, String> {
    let class = |name: &str| NAMES.iter().position(|n| *n == name).map(What::Class);
    let what = |name: &str| class(name).or_else(|| ops::by_name(name).map(What::Operation));
    let way = |name: &str| Way::ALL.into_iter().find(|w| w.name() == name);
    let (first, second) = text.split_once('-').map_or((text, None), |(a, b)| (a, Some(b)));
    let term = match (way(first), second) {
        (Some(w), Some(name)) => what(name).map(|what| Term { what: Some(what), way: Some(w) }),
        (Some(w), None) => Some(Term { what: None, way: Some(w) }),
        (None, None) => what(first).map(|what| Term { what: Some(what), way: None }),
        (None, Some(_)) => None,
    };
    let ways = Way::ALL.map(Way::name).join(", ");
    let names: Vec<&str> = OPERATIONS.iter().map(|operation| operation.name).collect();
    term.ok_or_else(|| {
        let (classes, names) = (NAMES.join(", "), names.join(", "));
        format!("one of {classes}; of {names}; of {ways}; or a way and one of the others, like raw-mapping")
    })
}

/// The selected operations, and the selected ways of each.
#[derive(Clone, Debug)]
pub struct Selection(Vec<[bool; Way::ALL.len()]>);

impl Selection {
    /// Selects from the words `only` and `without`. If `only` has names and ways by themselves, both must match. Words
    /// with name and way add to that. The words in `without` are left out.
    pub fn new(only: &[Term], without: &[Term]) -> Self {
        let both = |t: &&Term| t.what.is_some() && t.way.is_some();
        let has_names = only.iter().any(|t| t.what.is_some() && t.way.is_none());
        let has_ways = only.iter().any(|t| t.way.is_some() && t.what.is_none());
        let plain = has_names || has_ways || only.is_empty();
        let chosen = |operation: usize, way: Way| {
            let name_meets = !has_names || only.iter().any(|t| t.way.is_none() && t.meets(operation, way));
            let way_meets = !has_ways || only.iter().any(|t| t.what.is_none() && t.meets(operation, way));
            plain && name_meets && way_meets || only.iter().filter(both).any(|t| t.meets(operation, way))
        };
        let allowed = |operation: usize, way: Way| {
            let always = OPERATIONS[operation].class == Class::Access;
            always || chosen(operation, way) && !without.iter().any(|t| t.meets(operation, way))
        };
        Self((0..OPERATIONS.len()).map(|n| Way::ALL.map(|way| allowed(n, way))).collect())
    }

    pub fn allows(&self, operation: usize, way: Way) -> bool {
        self.0[operation][way as usize] && OPERATIONS[operation].ways.contains(&way)
    }

    /// Whether the operation is selected in any way.
    pub fn has(&self, operation: usize) -> bool {
        Way::ALL.into_iter().any(|way| self.allows(operation, way))
    }

    /// Whether the operation with this name is selected in this way.
    pub fn allows_named(&self, name: &str, way: Way) -> bool {
        ops::by_name(name).is_some_and(|operation| self.allows(operation, way))
    }
}
