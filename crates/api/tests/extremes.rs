//! JSON in which one number is at an end of its range: unit tests of `report` and `web` include this file.

use serde_json::{Value, json};

/// Numbers at which sums, products and signs go wrong.
const EXTREMES: [u64; 6] = [0, 1, (1 << 52) - 1, 1 << 52, i64::MAX as u64, u64::MAX];

/// The values in which an extreme takes the place of one of the numbers from `at` on (a JSON pointer). Before each, a text says which.
pub fn lies<'a>(whole: &'a Value, at: &str) -> impl Iterator<Item = (String, Value)> + 'a {
    let mut places = Vec::new();
    whole.pointer(at).into_iter().for_each(|value| numbers(value, at, &mut places));
    places.into_iter().flat_map(|place| EXTREMES.map(|number| (place.clone(), number))).filter_map(|(place, number)| {
        let mut lie = whole.clone();
        *lie.pointer_mut(&place)? = json!(number);
        Some((format!("{place} is {number}"), lie))
    })
}

/// Pointers to all numbers.
fn numbers(value: &Value, at: &str, found: &mut Vec<String>) {
    match value {
        Value::Number(_) => found.push(at.to_owned()),
        Value::Array(all) => {
            all.iter().enumerate().for_each(|(n, one)| numbers(one, &format!("{at}/{n}"), found));
        }
        Value::Object(all) => all.iter().for_each(|(key, one)| numbers(one, &format!("{at}/{key}"), found)),
        Value::Null | Value::Bool(_) | Value::String(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_lies_in_turn() {
        let whole = json!({"a": [1, {"b": 2}], "c": "3", "d": {"e": 4}});
        let all: Vec<_> = lies(&whole, "/a").collect();
        assert_eq!(all.len(), 2 * EXTREMES.len());
        assert_eq!(all[1].1, whole, "/a/0 is 1 anyway");
        assert_eq!(all[7], ("/a/1/b is 1".to_owned(), json!({"a": [1, {"b": 1}], "c": "3", "d": {"e": 4}})));
        assert!(lies(&whole, "/f").next().is_none());
    }
}
