//! Keeps metrics as text. The text for all callers that see the same groups is made at most twice a second, and not by
//! the thread that serves connections: with hundreds of members it takes some milliseconds, for which all other
//! requests would wait.

use crate::access::Scope;
use crate::asker::{Ages, Answer, Kept, lock};
use crate::metrics::Form;
use axum::body::Bytes;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Semaphore;

/// Age up to which a text is given to callers, before a new one is made: 500 ms.
const AGES: Ages = Ages { fresh: Duration::from_millis(500), good: Duration::from_millis(500) };
/// Age after which a text that nobody asks for is dropped: 10 s.
const KEEP: Duration = Duration::from_secs(10);
/// Number of texts that are made at the same time without anybody waiting for them.
const TURNS: usize = 1;

/// What distinguishes texts: the groups that a text shows, and its form.
type Of = (Scope, Form);

/// The texts, by groups and form.
pub struct Texts {
    all: Mutex<BTreeMap<Of, Arc<Kept<Bytes>>>>,
    turns: Arc<Semaphore>,
}

impl Default for Texts {
    fn default() -> Self {
        Self { all: Mutex::default(), turns: Arc::new(Semaphore::new(TURNS)) }
    }
}

impl Texts {
    /// The text in this form for callers that see these groups. `make` makes a new one if the kept one is too old.
    pub async fn get(
        &self,
        scope: Scope,
        form: Form,
        make: impl Fn() -> anyhow::Result<Bytes> + Clone + Send + 'static,
    ) -> Answer<Bytes> {
        let kept = {
            let mut all = lock(&self.all);
            all.retain(|_, kept| kept.is_younger(KEEP));
            Arc::clone(all.entry((scope, form)).or_insert_with(|| Kept::new(AGES, &self.turns)))
        };
        kept.get(make).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[tokio::test]
    async fn text_is_made_once_for_those_who_see_the_same_and_for_nobody_else() {
        let (texts, made) = (Texts::default(), Arc::new(AtomicU32::new(0)));
        let scope = |groups: &[&str]| -> Scope {
            Some(Arc::new(groups.iter().map(|group| (*group).to_owned()).collect::<BTreeSet<_>>()))
        };
        let get = async |scope: Scope, form, text: &'static str| {
            let made = Arc::clone(&made);
            let make = move || {
                made.fetch_add(1, Ordering::SeqCst);
                Ok(Bytes::from_static(text.as_bytes()))
            };
            let text = texts.get(scope, form, make).await.unwrap();
            String::from_utf8(text.to_vec()).unwrap()
        };
        assert_eq!(get(scope(&["a"]), Form::Plain, "a").await, "a");
        assert_eq!(get(scope(&["a"]), Form::OpenMetrics, "a open").await, "a open");
        assert_eq!(get(scope(&["a", "b"]), Form::Plain, "a b").await, "a b");
        assert_eq!(get(scope(&[]), Form::Plain, "none").await, "none");
        assert_eq!(get(None, Form::Plain, "all").await, "all");
        tokio::time::sleep(AGES.good).await;
        assert_eq!(get(scope(&["a"]), Form::Plain, "a later").await, "a later");
        assert_eq!(made.load(Ordering::SeqCst), 6);
        // Requests that come at the same time share one text, which is made once.
        let many = (0..50).map(|_| get(None, Form::Plain, "all later"));
        assert!(futures_util::future::join_all(many).await.iter().all(|text| text.starts_with("all")));
        assert!(made.load(Ordering::SeqCst) <= 8);
    }
}
