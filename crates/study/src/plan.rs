//! The order of turns: arms take turns forwards, then backwards (ABBA), so that slow changes of the machine cancel out.
//! Nothing is read or written here.

use crate::data::{Form, Length};

/// One turn: an arm, measured once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    /// The arm.
    pub arm: String,
    /// Number of the repetition, from 0; `None` for a warm-up, which is dropped.
    pub rep: Option<u32>,
    /// The form of the run.
    pub length: Length,
}

/// All turns of a run in their order.
pub fn turns(arms: &[String], reps: u32, form: Form, length: Length) -> Vec<Planned> {
    let warm_up = form.warm_up.then_some(None);
    let mut all = Vec::new();
    for (round, rep) in warm_up.into_iter().chain((0..reps).map(Some)).enumerate() {
        let mut order: Vec<&String> = arms.iter().collect();
        if round % 2 == 1 {
            order.reverse();
        }
        all.extend(order.into_iter().map(|arm| Planned { arm: arm.clone(), rep, length }));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arms_alternate_and_warm_up_comes_first() {
        let arms = ["a".to_owned(), "b".to_owned()];
        let form = Form { reps: 9, warm_up: true, turn_seconds: 1.0 };
        let order = |form| {
            let turns = turns(&arms, 3, form, Length::Short);
            turns.iter().map(|t| format!("{}{}", t.arm, t.rep.map_or("w".to_owned(), |r| r.to_string()))).collect()
        };
        let with: Vec<String> = order(form);
        assert_eq!(with.join(" "), "aw bw b0 a0 a1 b1 b2 a2");
        let without: Vec<String> = order(Form { warm_up: false, ..form });
        assert_eq!(without.join(" "), "a0 b0 b1 a1 a2 b2");
    }
}
