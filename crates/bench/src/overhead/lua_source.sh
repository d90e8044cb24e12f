set -e
# apt's own list may name no sources: what it names for binaries is asked for them too.
cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null | sed -n 's/^deb /deb-src /p' > sources.list
sed 's/^Types: deb$/Types: deb-src/' /etc/apt/sources.list.d/*.sources > more.sources 2>/dev/null || :
mkdir -p parts lists; mv more.sources parts/
options="-o Dir::Etc::sourcelist=$PWD/sources.list -o Dir::Etc::sourceparts=$PWD/parts -o Dir::State::lists=$PWD/lists"
apt-get -qq $options update
apt-get -qq $options --download-only source lua5.4
mkdir lua; tar -xf lua5.4_*.orig.tar.* -C lua --strip-components=1
