//! Decides, before guests start, whether there is memory for them.
//!
//! ```text
//!   Facts of a look --Standing::of--> Standing, kept between two looks --\
//!   promises that hold, memory that is available at the moment ------------> admit --> Admission: yes, or no and why
//!   a request: like a guest, or with so much memory ----------------------/
//! ```
//!
//! The two sums are those of the crate (`lib.rs`), less the promises, and with the memory that guests are assumed to
//! need:
//!
//! ```text
//!   spare = available - floor - promised - may take, without folded pages
//!   cover = available - floor - promised - may take, folded pages included + withdrawable
//! ```
//!
//! | policy | a guest that runs may take | a further guest takes |
//! |---|---|---|
//! | `strict` | all of its size, and each folded page | all of its RAM, and what its VMM takes beside it |
//! | `likely` | as much as the most that a guest of its kind has held alone | the same |
//! | `none` | nothing | as much as the guest of its kind that holds least |
//!
//! Guests of one *kind* are in one group and have equally much RAM. If nothing tells guests apart, the chance that one
//! of n further guests takes more than each of m measured ones is n / (m + n). Only guests count as measured that have
//! run for ten minutes.

use crate::ladder::Rung;
use crate::params::Params;
use crate::reserve::signed;
use crate::standing::{Held, Left, Standing};
use serde::{Deserialize, Serialize};

/// Bytes of a mebibyte.
const MIB: u64 = 1 << 20;
/// Time without pressure after which the pressure ladder goes down by a rung, in seconds: 1 minute.
const RUNG_S: u64 = 60;

/// How much memory must be there for a guest to be admitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum Assurance {
    /// The full storm: everything that guests may take is there.
    #[default]
    Strict,
    /// The storm that was measured of each kind of guests.
    Likely,
    /// No storm.
    None,
}

impl Assurance {
    /// Names, as they are written.
    pub const NAMES: [&str; 3] = ["strict", "likely", "none"];

    /// The name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Strict => "strict",
            Self::Likely => "likely",
            Self::None => "none",
        }
    }

    /// The policy of this name.
    pub fn named(name: &str) -> Option<Self> {
        [Self::Strict, Self::Likely, Self::None].into_iter().find(|one| one.name() == name)
    }
}

/// Guests that somebody wants to start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wanted {
    /// Id or name of a guest that they are like.
    pub like: Option<String>,
    /// RAM of each; `None`: as much as the guest has which they are like.
    pub memory_bytes: Option<u64>,
    /// Their group; `None`: the group of the guest which they are like.
    pub group: Option<String>,
    /// Number of them.
    pub guests: u64,
    /// The policy.
    pub assurance: Assurance,
}

/// Memory that one guest takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Costs {
    /// After its start: as much as the guest of its kind that holds least.
    pub start_bytes: u64,
    /// When it has diverged: the most that a guest of its kind has held alone.
    pub diverged_bytes: u64,
    /// In the worst break storm: all of its RAM, and what its VMM takes.
    pub storm_bytes: u64,
    /// Guests of its kind by which this was measured; with 0, all figures are those of the storm.
    pub measured_guests: u64,
    /// Of these, guests that have run for 10 minutes.
    pub settled_guests: u64,
}

/// The answer to a request to start guests.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Admission {
    /// Whether they fit.
    pub admitted: bool,
    /// The policy.
    pub policy: Assurance,
    /// Memory for all of them, by the policy.
    pub bytes: u64,
    /// Further guests like them that fit at the moment: without these, if they were admitted.
    pub more: u64,
    /// Memory that one of them takes.
    pub costs: Costs,
    /// Chance that one of them takes more than was measured; `null` where nothing rests on that.
    pub chance_of_more: Option<f64>,
    /// Memory that a full break storm takes: everything that guests may take, and promises.
    pub storm_bytes: u64,
    /// Memory that stands against it: what is available above the floor, and what can be withdrawn in 10 s.
    pub reserve_bytes: u64,
    /// Why they do not fit; `null` if they do.
    pub reason: Option<String>,
    /// Seconds after which the answer may be another one; `null` where no time can be told.
    pub again_s: Option<u64>,
    /// Whether withdrawing loans would make room.
    pub loans_would_do: bool,
}

impl Costs {
    /// Memory that one guest needs to be admitted. Of guests of a kind that was never measured, `Likely` knows nothing,
    /// and takes the figure of `Strict`.
    const fn by(&self, policy: Assurance) -> u64 {
        match policy {
            Assurance::Likely if self.settled_guests > 0 => self.diverged_bytes,
            Assurance::Strict | Assurance::Likely => self.storm_bytes,
            Assurance::None => self.start_bytes,
        }
    }
}

/// Decides whether the wanted guests are admitted. `held` are the promises that hold, `available` is the host's
/// available memory.
///
/// # Errors
/// The request does not say what guests are wanted: their RAM is not known, or their number is 0.
pub fn admit(standing: &Standing, held: &[Held], available: u64, wanted: &Wanted) -> Result<Admission, String> {
    let (group, ram_bytes) = kind_of(standing, wanted)?;
    let (policy, costs) = (wanted.assurance, standing.costs(group, ram_bytes));
    let (each, left) = (costs.by(policy).max(1), standing.left(held, available, policy));
    let bytes = each.saturating_mul(wanted.guests);
    let is_open = standing.rung < Rung::Refuse;
    let room = if is_open { left.spare.min(left.cover) } else { 0 };
    let admitted = is_open && signed(bytes) <= room;
    let free = u64::try_from(room).unwrap_or(0).saturating_sub(if admitted { bytes } else { 0 });
    let by_measure = policy == Assurance::Likely && costs.settled_guests > 0;
    let chance = wanted.guests as f64 / wanted.guests.saturating_add(costs.settled_guests) as f64;
    let no = if admitted { None } else { Some(refusal(standing, held, (bytes, left))) };
    let loans_would_do = no.as_ref().is_some_and(|no| no.loans_would_do) && policy == Assurance::Strict;
    Ok(Admission {
        admitted,
        policy,
        bytes,
        more: free.checked_div(each).unwrap_or(0),
        costs,
        chance_of_more: by_measure.then_some(chance),
        storm_bytes: standing.storm_bytes(held).saturating_add(if admitted { bytes } else { 0 }),
        reserve_bytes: standing.reserve_bytes(available),
        again_s: no.as_ref().and_then(|no| no.again_s),
        reason: no.map(|no| no.reason),
        loans_would_do,
    })
}

/// Group and RAM of the guests that are wanted.
fn kind_of<'a>(standing: &'a Standing, wanted: &'a Wanted) -> Result<(Option<&'a str>, u64), String> {
    let like = wanted.like.as_ref().map(|like| {
        let found = standing.guests.iter().find(|guest| guest.id == *like || guest.name == *like);
        found.ok_or_else(|| format!("no VM that memory is balanced for is called {like:?}"))
    });
    let like = match like {
        Some(Err(why)) if wanted.memory_bytes.is_none() => return Err(why),
        like => like.and_then(Result::ok),
    };
    let group = wanted.group.as_deref().or_else(|| like.map(|guest| guest.group.as_str()));
    let ram_bytes = wanted.memory_bytes.or_else(|| like.map(|guest| guest.ram_bytes));
    match ram_bytes {
        Some(ram_bytes) if ram_bytes > 0 && wanted.guests > 0 => Ok((group, ram_bytes)),
        Some(_) => Err("a guest has some memory, and there is one at least".into()),
        None => Err("name a guest that they are like, or their memory".into()),
    }
}

/// Why guests are not admitted, and when the answer may be another one.
struct No {
    reason: String,
    again_s: Option<u64>,
    loans_would_do: bool,
}

fn refusal(standing: &Standing, held: &[Held], (bytes, left): (u64, Left)) -> No {
    let [wanted_mib, spare_mib, cover_mib] = [signed(bytes), left.spare, left.cover].map(|bytes| bytes >> 20);
    let wanted_mib = wanted_mib.saturating_add(i64::from(bytes % MIB > 0));
    if standing.rung >= Rung::Refuse {
        let reason = "the host has been short of memory, and withdrawing loans did not help".to_owned();
        return No { reason, again_s: Some(RUNG_S), loans_would_do: false };
    }
    let lacking = signed(bytes).saturating_sub(left.spare.min(left.cover));
    let loans_would_do = signed(bytes) <= left.cover && lacking <= signed(standing.withdrawable_bytes);
    let sums = format!(
        "{wanted_mib} MiB are wanted: {spare_mib} MiB are spare, and {cover_mib} MiB are left when all guests take what they may take"
    );
    let lapses = lapse(held, lacking);
    let (more, again_s) = match (loans_would_do, lapses) {
        (true, _) => ("; loans that can be withdrawn would do", Some(Params::default().withdrawal.as_secs())),
        (false, Some(left_s)) => ("; promises that nobody has used would do, and lapse", Some(left_s)),
        (false, None) => ("; it changes when guests end, or folding saves more", None),
    };
    No { reason: format!("{sums}{more}"), again_s, loans_would_do }
}

/// Seconds until promises of `lacking` bytes together have lapsed; `None` if all promises hold less.
fn lapse(held: &[Held], lacking: i64) -> Option<u64> {
    let mut held = held.to_vec();
    held.sort_by_key(|held| held.left_s);
    let mut sum = 0_u64;
    held.into_iter().find_map(|held| {
        sum = sum.saturating_add(held.bytes);
        (signed(sum) >= lacking).then_some(held.left_s)
    })
}
