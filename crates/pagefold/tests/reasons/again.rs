//! Reasons are looked at again, and remedies change what they say.

use crate::common::service::{Service, cannot_fold, folded_pages, until};
use crate::{carry_out, fix, known_pages, member, until_state};

/// The advice was twice the setting, which a pool that is larger by far does not notice.
#[test]
fn pool_that_holds_more_than_it_may_is_enlarged_beyond_that() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let _first = member(&service, "a");
    until(60, "it is folded", || folded_pages(&service.show("acme"), "a") == 400);
    service.set("acme", &["--pool", "64K"]);
    let mut second = service.run("acme", "b", &[], &[&known_pages()]);
    for line in ["alloc x 400", "fill x 0 200 1000", "fill x 200 200 1000", "mergeable x"] {
        second.tell(line);
    }
    let row = until_state(&service, "b", "no_room");
    carry_out(&service, fix(&row));
    until(60, "it is folded, too", || folded_pages(&service.show("acme"), "b") > 300);
    until_state(&service, "b", "folding");
}
