//! Asks the supervisor through its control socket, and keeps each answer for two seconds.
//!
//! | age of the answer that is kept | a caller gets | the supervisor |
//! |---|---|---|
//! | up to 1 s | the kept answer | is not asked |
//! | up to 2 s | the kept answer | is asked, for later callers |
//! | older; an error from 1 s on | the next answer | is asked |
//!
//! However many callers ask, each question is asked at most once a second, and by one thread at a time. So all callers
//! together load the supervisor no more than one that asks every second. If the callers that wait for an answer leave,
//! the question still runs to its end.
//!
//! Questions for whose answers nobody waits are asked a few at a time. The workers of all groups would otherwise wake
//! at the same moment, and take the processors from the answer that is being given.

use api::ask::{GroupLine, GroupState, MemberLine, Trouble};
use api::change::Change;
use api::client::Service;
use api::control::Settings;
use api::history::{Told, Wanted};
use api::place::Place;
use api::promise::{Answered, Asked};
use api::shown;
use cli::exit::in_words;
use cli::journal::By;
use futures_util::future::join_all;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, Semaphore};
use tokio::time::timeout;

/// How long the supervisor's answers are kept: a newer one is asked for after 1 s, and waited for after 2 s.
const AGES: Ages = Ages { fresh: Duration::from_secs(1), good: Duration::from_secs(2) };
/// Longest wait for the figures of a group in a list, after which they are left out: 2 s.
const LIST_PATIENCE: Duration = Duration::from_secs(2);
/// Most questions asked at the same time while no caller waits for their answers.
const TURNS: usize = 2;
/// Time after which the next such question is asked, although this one is not answered yet: 100 ms.
const TURN: Duration = Duration::from_millis(100);
/// Reason shown for a member without an agent: this process may not read the member's `/proc` files.
const WHY_ABSENT: &str = "no agent of it is connected; `pagefold group show` tells root why";

/// Why a member's agent does nothing, for [`shown::complete`]. This process may not examine the member's process, so it
/// is the same reason for every member without an agent.
fn look(_: u32, is_connected: bool) -> Option<shown::Look> {
    let absent =
        || shown::Look { why: WHY_ABSENT.into(), fix: api::member_words::START_ITSELF.into(), ..Default::default() };
    (!is_connected).then(absent)
}

/// An answer, or the reason why there is none.
pub type Answer<T> = Result<Arc<T>, Arc<str>>;

/// A group, with its state if that came in time.
#[derive(Clone, Debug)]
pub struct Group {
    /// The group's line in the list of groups.
    pub line: GroupLine,
    /// The group's state; `None` if it did not come in time.
    pub state: Option<Arc<GroupState>>,
}

/// How long an answer is kept.
#[derive(Clone, Copy, Debug)]
pub struct Ages {
    /// Age up to which an answer is given and no newer one is asked for.
    pub fresh: Duration,
    /// Age up to which an answer is given, and a newer one is asked for.
    pub good: Duration,
}

/// The latest answer to one question.
pub struct Kept<T> {
    ages: Ages,
    state: Mutex<State<T>>,
    answered: Notify,
    turns: Arc<Semaphore>,
}

struct State<T> {
    last: Option<(Instant, Answer<T>)>,
    asking: bool,
    /// Whether [`Kept::forget`] was called while the question was under way: its answer may be out of date.
    outdated: bool,
}

/// Locks a mutex even if it is poisoned: its value is consistent also after a panic.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T: Send + Sync + 'static> Kept<T> {
    /// A question that has no answer yet. When it is asked and no caller waits for the answer, it first waits for one
    /// of `turns`, which it shares with other questions.
    pub fn new(ages: Ages, turns: &Arc<Semaphore>) -> Arc<Self> {
        let state = Mutex::new(State { last: None, asking: false, outdated: false });
        Arc::new(Self { ages, state, answered: Notify::new(), turns: Arc::clone(turns) })
    }

    /// Whether the latest answer is younger than `age`, or the question is being asked.
    pub fn is_younger(&self, age: Duration) -> bool {
        let state = lock(&self.state);
        state.asking || state.last.as_ref().is_some_and(|(at, _)| at.elapsed() < age)
    }

    /// The latest answer if its age is below [`Ages::good`], or else the next one. If its age is [`Ages::fresh`] or
    /// more, the question is asked: `ask` is called in another thread.
    pub async fn get(self: &Arc<Self>, ask: impl Fn() -> anyhow::Result<T> + Clone + Send + 'static) -> Answer<T> {
        loop {
            let mut answered = std::pin::pin!(self.answered.notified());
            {
                let mut state = lock(&self.state);
                let last = state.last.as_ref().map(|(at, answer)| (at.elapsed(), answer.clone()));
                if let Some((_, answer)) = last.as_ref().filter(|(age, _)| *age < self.ages.fresh) {
                    return answer.clone();
                }
                // From here on, a notification of `put` is not missed.
                answered.as_mut().enable();
                let good = last.filter(|(age, answer)| *age < self.ages.good && answer.is_ok());
                if !std::mem::replace(&mut state.asking, true) {
                    let (kept, ask) = (Arc::clone(self), ask.clone());
                    let put = move || kept.put(ask());
                    if good.is_some() {
                        tokio::spawn(in_turn(Arc::clone(&self.turns), put));
                    } else {
                        tokio::task::spawn_blocking(put);
                    }
                }
                if let Some((_, answer)) = good {
                    return answer;
                }
            }
            answered.await;
        }
    }

    fn put(&self, answer: anyhow::Result<T>) {
        let answer = answer.map(Arc::new).map_err(|e| Arc::from(in_words(&e)));
        let mut state = lock(&self.state);
        let last = (!state.outdated).then(|| (Instant::now(), answer));
        *state = State { last, asking: false, outdated: false };
        drop(state);
        self.answered.notify_waiters();
    }

    /// Forgets the latest answer. If the question is being asked, its answer will be ignored, and it is asked again.
    fn forget(&self) {
        let mut state = lock(&self.state);
        (state.last, state.outdated) = (None, state.asking);
    }
}

/// Runs `put` in a thread when one of `turns` is free.
async fn in_turn(turns: Arc<Semaphore>, put: impl FnOnce() + Send + 'static) {
    // The semaphore is never closed.
    let turn = turns.acquire().await;
    let _ = timeout(TURN, tokio::task::spawn_blocking(put)).await;
    drop(turn);
}

/// Asks the supervisor.
pub struct Asker {
    place: Place,
    turns: Arc<Semaphore>,
    groups: Arc<Kept<Vec<GroupLine>>>,
    members: Arc<Kept<Vec<MemberLine>>>,
    states: Mutex<BTreeMap<String, Arc<Kept<GroupState>>>>,
    supervisor: Arc<Kept<u32>>,
    troubles: Arc<Kept<Vec<Trouble>>>,
}

impl Asker {
    /// Asks the supervisor of this place.
    pub fn new(place: Place) -> Self {
        let turns = Arc::new(Semaphore::new(TURNS));
        Self {
            place,
            groups: Kept::new(AGES, &turns),
            members: Kept::new(AGES, &turns),
            states: Mutex::default(),
            supervisor: Kept::new(AGES, &turns),
            troubles: Kept::new(AGES, &turns),
            turns,
        }
    }

    /// All groups, sorted by name.
    pub async fn groups(&self) -> Answer<Vec<GroupLine>> {
        let place = self.place.clone();
        let groups = self.groups.get(move || Service::connect_soon(&place)?.groups()).await?;
        lock(&self.states).retain(|name, _| groups.iter().any(|group| group.name == *name));
        Ok(groups)
    }

    /// All members.
    pub async fn members(&self) -> Answer<Vec<MemberLine>> {
        let place = self.place.clone();
        self.members.get(move || Service::connect_soon(&place)?.members()).await
    }

    /// The state of a group that exists.
    pub async fn state(&self, group: &str) -> Answer<GroupState> {
        let members = self.members().await?;
        let kept =
            Arc::clone(lock(&self.states).entry(group.to_owned()).or_insert_with(|| Kept::new(AGES, &self.turns)));
        let (place, group) = (self.place.clone(), group.to_owned());
        kept.get(move || {
            let mut state = Service::connect_soon(&place)?.show(&group)?;
            shown::complete(&mut state, &members, look);
            Ok(state)
        })
        .await
    }

    /// The groups for which `wanted` is true, with the states that come within [`LIST_PATIENCE`].
    ///
    /// # Errors
    /// The supervisor does not answer.
    pub async fn all(&self, wanted: impl Fn(&str) -> bool) -> Result<Vec<Group>, Arc<str>> {
        let groups = self.groups().await?;
        let of = groups.iter().filter(|line| wanted(&line.name)).map(async |line| {
            let state = timeout(LIST_PATIENCE, self.state(&line.name)).await;
            Group { line: line.clone(), state: state.ok().and_then(Result::ok) }
        });
        Ok(join_all(of).await)
    }

    /// Changes a group's settings.
    pub async fn set(&self, by: By, group: &str, change: Change) -> Answer<Settings> {
        let (place, name) = (self.place.clone(), group.to_owned());
        let ask = move || Service::connect_soon(&place)?.set_for(by, &name, change);
        let asked = tokio::task::spawn_blocking(ask).await;
        self.groups.forget();
        if let Some(kept) = lock(&self.states).get(group) {
            kept.forget();
        }
        let settings = asked.map_err(|e| e.to_string())?.map_err(|e| in_words(&e))?;
        Ok(Arc::new(settings))
    }

    /// Asks the supervisor whether further guests fit. No answer is kept, since each is a promise.
    ///
    /// # Errors
    /// The supervisor refuses, or does not answer.
    pub async fn admit(&self, by: By, asked: Asked) -> Result<Answered, Arc<str>> {
        let place = self.place.clone();
        let ask = move || Service::connect_soon(&place)?.admit_for(by, asked);
        tokio::task::spawn_blocking(ask).await.map_err(|e| e.to_string())?.map_err(|e| in_words(&e).into())
    }

    /// Tells the supervisor the number of requests with an invalid token, in all and by address.
    ///
    /// # Errors
    /// The supervisor does not answer.
    pub async fn login_failed(&self, times: u32, addresses: BTreeMap<String, u32>) -> Result<(), Arc<str>> {
        let place = self.place.clone();
        let ask = move || Service::connect_soon(&place)?.login_failed(times, addresses);
        tokio::task::spawn_blocking(ask).await.map_err(|e| e.to_string())?.map_err(|e| in_words(&e).into())
    }

    /// Lines of the journal after a place in it, each with the place at which it ends, and the place from which to read
    /// on.
    ///
    /// # Errors
    /// The supervisor does not answer.
    pub async fn journal(&self, after: u64) -> Result<(Vec<(u64, Value)>, u64), Arc<str>> {
        // Of all callers that follow the journal, at most [`TURNS`] ask at a time. The semaphore is never closed.
        let _turn = self.turns.acquire().await;
        let place = self.place.clone();
        let ask = move || Service::connect_soon(&place)?.journal(after);
        tokio::task::spawn_blocking(ask).await.map_err(|e| e.to_string())?.map_err(|e| in_words(&e).into())
    }

    /// Asks the process that keeps a history; `None` if no such process listens. The calling thread blocks.
    ///
    /// # Errors
    /// The process does not answer.
    pub fn history(&self, wanted: &Wanted) -> anyhow::Result<Option<Told>> {
        api::history::ask(&self.place, wanted)
    }

    /// Troubles of the service itself.
    pub async fn troubles(&self) -> Answer<Vec<Trouble>> {
        let place = self.place.clone();
        self.troubles.get(move || Service::connect_soon(&place)?.troubles()).await
    }

    /// The pid of the supervisor.
    pub async fn supervisor(&self) -> Answer<u32> {
        let place = self.place.clone();
        self.supervisor.get(move || Service::connect_soon(&place)?.pid()).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc::{Receiver, channel};

    fn kept() -> Arc<Kept<u32>> {
        Kept::new(AGES, &Arc::new(Semaphore::new(TURNS)))
    }

    /// A question that counts in `asked` how often it is asked. With `told`, it is answered only when something is sent
    /// there.
    fn counted(
        asked: &Arc<AtomicU32>,
        told: Option<Arc<Mutex<Receiver<()>>>>,
    ) -> impl Fn() -> anyhow::Result<u32> + Clone + Send + use<> {
        let asked = Arc::clone(asked);
        move || {
            let number = asked.fetch_add(1, Ordering::SeqCst);
            if let Some(told) = &told {
                let _ = lock(told).recv();
            }
            Ok(number)
        }
    }

    #[tokio::test]
    async fn question_is_asked_once_however_many_wait_and_leave() {
        let (asked, kept) = (Arc::default(), kept());
        let (tell, told) = channel();
        let told = Some(Arc::new(Mutex::new(told)));
        // The first caller leaves before there is an answer.
        let first = timeout(Duration::from_millis(20), kept.get(counted(&asked, told))).await;
        assert!(first.is_err());
        tell.send(()).unwrap();
        let waiting = join_all((0..50).map(|_| kept.get(counted(&asked, None))));
        assert!(waiting.await.iter().all(|answer| **answer.as_ref().unwrap() == 0));
        assert_eq!(asked.load(Ordering::SeqCst), 1);
        kept.forget();
        assert_eq!(*kept.get(counted(&asked, None)).await.unwrap(), 1);
    }

    #[tokio::test]
    async fn good_answer_is_given_while_the_next_one_is_asked_for() {
        let (asked, kept) = (Arc::default(), kept());
        let at_once = async |told| timeout(AGES.fresh / 2, kept.get(counted(&asked, told))).await;
        assert_eq!(*at_once(None).await.unwrap().unwrap(), 0);
        tokio::time::sleep(AGES.fresh).await;
        let (tell, told) = channel();
        let told = Some(Arc::new(Mutex::new(told)));
        assert_eq!(*at_once(told).await.expect("nobody waits").unwrap(), 0);
        tokio::time::sleep(AGES.good - AGES.fresh).await;
        assert!(at_once(None).await.is_err(), "it is too old by now");
        tell.send(()).unwrap();
        assert_eq!(*kept.get(counted(&asked, None)).await.unwrap(), 1);
        assert_eq!(asked.load(Ordering::SeqCst), 2);
    }

    #[tokio::test]
    async fn answer_that_was_asked_for_before_a_change_is_not_given_after_it() {
        let (asked, kept) = (Arc::default(), kept());
        let (tell, told) = channel();
        let told = Some(Arc::new(Mutex::new(told)));
        let before = timeout(Duration::from_millis(20), kept.get(counted(&asked, told))).await;
        assert!(before.is_err());
        kept.forget();
        tell.send(()).unwrap();
        assert_eq!(*kept.get(counted(&asked, None)).await.unwrap(), 1);
    }

    #[tokio::test]
    async fn silent_worker_keeps_no_other_question_waiting_for_long() {
        let turns = Arc::new(Semaphore::new(TURNS));
        let (asked, all) = (Arc::<AtomicU32>::default(), [(); TURNS + 1].map(|()| Kept::<u32>::new(AGES, &turns)));
        for kept in &all {
            kept.get(counted(&asked, None)).await.unwrap();
        }
        tokio::time::sleep(AGES.fresh).await;
        let (tell, told) = channel();
        let told = Some(Arc::new(Mutex::new(told)));
        for kept in &all {
            // The old answer is given to the caller while the question is asked again.
            kept.get(counted(&asked, told.clone())).await.unwrap();
        }
        let number = || asked.load(Ordering::SeqCst) as usize;
        let until = Instant::now() + Duration::from_secs(20);
        while number() < 2 * TURNS + 2 && Instant::now() < until {
            tokio::time::sleep(TURN / 10).await;
        }
        assert_eq!(number(), 2 * TURNS + 2, "one of those that had their turn is silent");
        all.iter().for_each(|_| tell.send(()).unwrap());
    }
}
