# Sourced: packages of other Debian releases, by a private apt folder that leaves the system's
# configuration alone.
# shellcheck shell=bash

# Runs a command in a fresh folder, which it prints, where apt-get knows one release alone. The
# caller removes the folder. Fails where the release cannot be had.
in_debian() { # release command...
    local release=$1 work mirror keys=/usr/share/keyrings/debian-archive-keyring.gpg
    shift
    # shellcheck disable=SC2016 # apt expands it
    mirror=$(apt-get indextargets --no-release-info --format '$(REPO_URI)' 'Created-By: Packages' |
        grep -m 1 '/debian/\?$') || { echo "apt knows no Debian mirror" >&2; return 1; }
    work=$(mktemp -d)
    # apt downloads as a user of its own, who must reach the folder.
    chmod 755 "$work"
    mkdir -p "$work/apt/lists/partial" "$work/apt/cache/archives/partial"
    printf '%s [signed-by=%s] %s %s main\n' deb $keys "$mirror" "$release" \
        deb-src $keys "$mirror" "$release" >"$work/apt/sources.list"
    cat >"$work/apt/apt.conf" <<CONF
Dir::Etc::SourceList "$work/apt/sources.list";
Dir::Etc::SourceParts "/dev/null";
Dir::State::Lists "$work/apt/lists";
Dir::State::status "/dev/null";
Dir::Cache "$work/apt/cache";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
Acquire::Languages "none";
Acquire::Retries "3";
APT::Sandbox::User "root";
#clear APT::Update::Post-Invoke-Success;
CONF
    if ! (
        cd "$work"
        export APT_CONFIG=$work/apt/apt.conf
        apt-get -q update && "$@"
    ) >"$work/apt/log" 2>&1; then
        cat "$work/apt/log" >&2
        rm -rf "$work"
        return 1
    fi
    rm -rf "$work/apt"
    printf '%s\n' "$work"
}
