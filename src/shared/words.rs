//! What the words of a row stand for.

/// Declares an enum whose members are kept as a word and shown by name.
macro_rules! word_enum {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident => $text:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u64)]
        pub enum $name { $($(#[$vdoc])* $variant,)+ }

        impl Default for $name {
            fn default() -> $name {
                $name::ALL[0]
            }
        }

        impl $name {
            pub const ALL: &'static [$name] = &[$($name::$variant,)+];

            pub fn name(self) -> &'static str {
                match self { $($name::$variant => $text,)+ }
            }

            /// The member that a row's word stands for; the first for a word that is none.
            pub fn from_word(word: u64) -> $name {
                usize::try_from(word).ok().and_then(|i| $name::ALL.get(i)).copied().unwrap_or($name::ALL[0])
            }
        }
    };
}

word_enum! {
    /// What a server's overlap rests on.
    Mode {
        /// No events are configured, or none can be used: what was routed there counts.
        Approximate => "approximate",
        /// All that the engine holds is known.
        Events => "events",
        /// The engine's replay buffer did not reach back to its start: what was routed there
        /// counts too.
        Partial => "partial",
    }
}

impl Mode {
    /// Whether what is routed to the server tells more than its events.
    pub fn learns(self) -> bool {
        self != Mode::Events
    }
}

word_enum! {
    /// Why a server's events are not coming in as they should.
    ServerError {
        None => "",
        NotConnected => "event socket is not connected",
        NotZmq => "event address does not speak zmtp",
        ReplayUnanswered => "replay was not answered",
        GapUnfilled => "a gap in the events could not be filled",
        BlockSize => "block size differs from kvc_aware_block_size",
        BadAddress => "event address is not valid",
        Garbage => "messages could not be decoded",
        Panicked => "event handling failed",
    }
}

word_enum! {
    /// Why a message or an event was not applied.
    Dropped {
        /// Not three frames, or a sequence number that is not eight bytes.
        BadFrames => "bad_frames",
        /// Not msgpack, or not a batch.
        BadPayload => "bad_payload",
        BadEvent => "bad_event",
        UnknownEvent => "unknown_event",
        UnknownMedium => "unknown_medium",
        /// A group that is not full attention: its blocks are no prefix.
        Group => "group",
        /// The parent block is not held by this server.
        Orphan => "orphan",
        /// The hashes do not fit the tokens and the block size.
        Shape => "shape",
        /// An offloading connector's event that carries no tokens.
        NoTokens => "no_tokens",
        BlockSize => "block_size",
        /// Older than what was applied.
        Stale => "stale",
        /// Another data-parallel rank than this connection's.
        Rank => "rank",
        /// The same engine hash with other contents.
        Contradiction => "contradiction",
        /// The index had no room and nothing to evict.
        Full => "full",
        TooLarge => "too_large",
        /// Live messages that did not fit in the bounded queue while a replay ran.
        Overflow => "overflow",
    }
}
