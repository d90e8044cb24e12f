//! Work for guests of a bench or a test: shell commands to run in a VM.

/// A churn of page cache, database and processes: it runs in the background until the guest ends.
///
/// - Each turn inserts 500 rows into a table of the database, updates 200 and deletes `deleted_rows`: with 500, the table
///   keeps its size. Then it starts a process that sleeps for a second.
/// - Meanwhile each pass over the system's files reads them all, pauses for `pause_seconds`, drops the page cache, and pauses
///   as long again.
///
/// A command that the guest's image lacks fails quickly, and the others go on.
pub fn churn_script(pause_seconds: u64, deleted_rows: u32) -> String {
    format!(
        "(while :; do \
         mariadb -e 'CREATE DATABASE IF NOT EXISTS bench; CREATE TABLE IF NOT EXISTS bench.t (n INT AUTO_INCREMENT PRIMARY KEY, s TEXT); \
         INSERT INTO bench.t (s) SELECT REPEAT(MD5(seq), 50) FROM seq_1_to_500; UPDATE bench.t SET s = REPEAT(MD5(n), 40) ORDER BY RAND() LIMIT 200; \
         DELETE FROM bench.t ORDER BY n LIMIT {deleted_rows}'; sh -c 'sleep 1'; done) </dev/null >/dev/null 2>&1 & \
         (while :; do \
         find /usr/bin /usr/lib /bin /lib -type f -size -4096k -exec sha256sum {{}} + ; sleep {pause_seconds}; \
         sync; echo 3 > /proc/sys/vm/drop_caches; sleep {pause_seconds}; done) </dev/null >/dev/null 2>&1 &"
    )
}
