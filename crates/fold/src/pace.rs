//! The pace of members ([`wire::Pace`]): the settings that each member is sent, with its share of the group's scan
//! rate.

use api::control::{Fold, Settings, ZeroPolicy};
use page::Fingerprint;
use wire::{FoldMode, HugePages, Pace, ZeroPages};

/// The settings to send to a member. `interval` is the part of the hash space that the index covers.
pub fn pace(settings: &Settings, clearing: bool, interval: (u64, u64), pages_per_s: Option<u32>) -> Pace {
    let fold = match settings.fold {
        Fold::On if !clearing => FoldMode::On,
        Fold::Off if !clearing => FoldMode::Off,
        Fold::On | Fold::Off | Fold::Unfold => FoldMode::Unfold,
    };
    let zero_pages = match settings.zero_pages {
        ZeroPolicy::Share => ZeroPages::Share,
        ZeroPolicy::Ignore => ZeroPages::Ignore,
        ZeroPolicy::WhenIdle => ZeroPages::WhenIdle,
    };
    let huge_pages = settings.split_huge_at_percent.map_or(HugePages::Keep, |n| HugePages::SplitAt(n.clamp(1, 100)));
    Pace { pages_per_s, fold, zero_pages, huge_pages, first: Fingerprint(interval.0), last: Fingerprint(interval.1) }
}

/// Divides the group's scan rate among members in proportion to their `pages`. Each gets at least one page a second;
/// `None` if there is no rate.
pub fn shares(rate: Option<u32>, pages: &[u64]) -> Vec<Option<u32>> {
    let all: u128 = pages.iter().map(|pages| u128::from(*pages) + 1).sum();
    let share = |rate: u32, pages: u64| (u128::from(rate) * (u128::from(pages) + 1) / all.max(1)) as u32;
    pages.iter().map(|pages| rate.map(|rate| share(rate, *pages).clamp(1, u32::MAX - 1))).collect()
}

/// Whether settings are so close to the ones that the member was sent last that it need not be sent them: only its
/// share of the scan rate differs, by 1/16 at most.
pub fn is_close(told: &Pace, pace: &Pace) -> bool {
    let close = match (told.pages_per_s, pace.pages_per_s) {
        (Some(told), Some(now)) => told.abs_diff(now) <= told / 16,
        (told, now) => told == now,
    };
    close && Pace { pages_per_s: None, ..*told } == Pace { pages_per_s: None, ..*pace }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_is_divided_in_proportion_to_pages() {
        assert_eq!(shares(None, &[5, 0]), [None, None]);
        assert_eq!(shares(Some(1000), &[299, 99]), [Some(750), Some(250)]);
        assert_eq!(shares(Some(1), &[u64::MAX, u64::MAX, 0]), [Some(1); 3]);
        assert_eq!(shares(Some(7), &[]), []);
    }

    #[test]
    fn clearing_tells_members_to_unfold() {
        let told = |fold, clearing| pace(&Settings { fold, ..Settings::default() }, clearing, (0, 1), None).fold;
        assert_eq!(told(Fold::On, false), FoldMode::On);
        assert_eq!(told(Fold::Off, false), FoldMode::Off);
        assert_eq!(told(Fold::Off, true), FoldMode::Unfold);
        assert_eq!(told(Fold::On, true), FoldMode::Unfold);
        assert_eq!(told(Fold::Unfold, false), FoldMode::Unfold);
    }

    #[test]
    fn small_change_of_share_is_not_told() {
        let pace = |rate| pace(&Settings::default(), false, (0, 9), rate);
        assert!(is_close(&pace(Some(1000)), &pace(Some(1050))));
        assert!(!is_close(&pace(Some(1000)), &pace(Some(1100))));
        assert!(!is_close(&pace(None), &pace(Some(1))));
        assert!(!is_close(&pace(None), &Pace { first: Fingerprint(1), ..pace(None) }));
    }
}
