-- A file of version 1, as the first release wrote it. It stays as it is: every later version has to read it.
CREATE TABLE owner (id INTEGER PRIMARY KEY, grp TEXT NOT NULL, member TEXT NOT NULL, UNIQUE (grp, member));
CREATE TABLE block (id INTEGER PRIMARY KEY, owner INTEGER NOT NULL, step INTEGER NOT NULL, start INTEGER NOT NULL,
                    count INTEGER NOT NULL, data BLOB NOT NULL);
CREATE INDEX block_of ON block (owner, step, start);
CREATE INDEX block_age ON block (step, start);
CREATE TABLE tick (id INTEGER PRIMARY KEY, at INTEGER NOT NULL, data BLOB NOT NULL);
CREATE TABLE note (id INTEGER PRIMARY KEY, at INTEGER NOT NULL, text TEXT NOT NULL);
PRAGMA user_version = 1;
INSERT INTO owner VALUES (1, 'acme', ''), (2, 'acme', 'web1');
-- 4096, 8192, none, -4096
INSERT INTO block VALUES (1, 1, 10, 1800000000, 4, X'c8e9ad92000a010201058020804002b0');
-- 12288 of both
INSERT INTO tick VALUES (1, 1800000960, X'233e575a010180c001010180c001');
INSERT INTO note VALUES (1, 1800000020, 'something was lost');
