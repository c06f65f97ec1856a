//! nftables: rules for address translation in a table of their own. Each rule, and each element of a set ([`crate::Set`]), has
//! its owner's name as a comment, so that `nft list ruleset` shows the owner, and what an owner has can be removed by
//! name. A change is one transaction.
//!
//! ```text
//!   table ip TABLE        chains of address translation (nat) at the hooks of the callers
//!   table ip6 TABLE       chains without a hook, to which rules jump; sets and maps
//!   table ip TABLE        chain guard: filter, before connection tracking; without an owner, see below
//!   table bridge TABLE    chains of frames that arrive at ports of bridges; sets
//! ```
//! The table is kept when its last rule is removed, like the chains of other tools, because adding and removing NAT
//! hooks is more expensive. Rules: include/uapi/linux/netfilter/{nfnetlink,nf_tables}.h. Numbers in attributes are big
//! endian.

use std::net::{IpAddr, Ipv4Addr};

use nix::errno::Errno;

use crate::address::Network;
use crate::message::{Batch, Message, NLM_F_APPEND, NLM_F_CREATE, NLM_F_DUMP, text};
use crate::rule::Rule;
use crate::{Error, Socket, TRIES, set};

pub(crate) const NFNL_MSG_BATCH_BEGIN: u16 = 0x10;
pub(crate) const NFNL_MSG_BATCH_END: u16 = 0x11;
pub(crate) const NFNL_BATCH_GENID: u16 = 1;
const NFNL_SUBSYS_NFTABLES: u8 = 10;
const NFT_MSG_NEWTABLE: u16 = 0;
const NFT_MSG_NEWCHAIN: u16 = 3;
pub(crate) const NFT_MSG_NEWRULE: u16 = 6;
pub(crate) const NFT_MSG_GETRULE: u16 = 7;
pub(crate) const NFT_MSG_DELRULE: u16 = 8;

const NFPROTO_IPV4: u8 = 2;
const NFPROTO_BRIDGE: u8 = 7;
const NFPROTO_IPV6: u8 = 10;

const NFTA_TABLE_NAME: u16 = 1;
const NFTA_CHAIN_TABLE: u16 = 1;
const NFTA_CHAIN_NAME: u16 = 3;
const NFTA_CHAIN_HOOK: u16 = 4;
const NFTA_CHAIN_TYPE: u16 = 7;
const NFTA_HOOK_HOOKNUM: u16 = 1;
const NFTA_HOOK_PRIORITY: u16 = 2;
pub(crate) const NFTA_RULE_TABLE: u16 = 1;
pub(crate) const NFTA_RULE_CHAIN: u16 = 2;
pub(crate) const NFTA_RULE_HANDLE: u16 = 3;
pub(crate) const NFTA_RULE_EXPRESSIONS: u16 = 4;
const NFTA_RULE_USERDATA: u16 = 7;
pub(crate) const NFTA_LIST_ELEM: u16 = 1;
pub(crate) const NFTA_EXPR_NAME: u16 = 1;

/// Type of a comment in a rule's user data (libnftnl, NFTNL_UDATA_RULE_COMMENT).
const USERDATA_COMMENT: u8 = 0;
/// Size of `struct nfgenmsg` in bytes.
pub(crate) const HEADER_BYTES: usize = 4;

const LOOPBACK: Network = Network { address: IpAddr::V4(Ipv4Addr::new(127, 0, 0, 0)), prefix: 8 };
/// Name of the chain of [`Rules::guard_loopback`].
const GUARD: &str = "guard";
/// Type, hook (NF_INET_PRE_ROUTING) and priority (NF_IP_PRI_RAW) of the guard: before connection tracking and address
/// translation.
const GUARD_HOOK: (&str, u32, i32) = ("filter", 0, -300);

/// Errors of a listing that mean that there is nothing: no table, or a kernel without tables of this family.
pub(crate) const MISSING: [Errno; 2] = [Errno::ENOENT, Errno::EOPNOTSUPP];
/// Priority of a chain of frames (NF_BR_PRI_NAT_DST_BRIDGED): before fragments are reassembled.
const FRAMES_PRIORITY: i32 = -300;

/// Hooks of frames that arrive at ports of bridges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FramesHook {
    /// Frames before the bridge learns from them, except those to the addresses 01:80:c2:00:00:02 to 0f (NF_BR_PRE_ROUTING).
    Prerouting,
    /// Frames for this host, and all to the addresses 01:80:c2:00:00:00 to 0f (NF_BR_LOCAL_IN).
    Input,
}

/// The packets that a table sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    /// IPv4.
    Ipv4,
    /// IPv6.
    Ipv6,
    /// Frames at the ports of bridges (Linux 4.18 with CONFIG_NF_TABLES_BRIDGE).
    Bridge,
}

impl Family {
    /// All families.
    pub const ALL: [Self; 3] = [Self::Ipv4, Self::Ipv6, Self::Bridge];

    /// The family of an address.
    pub fn of(address: IpAddr) -> Self {
        if address.is_ipv6() { Self::Ipv6 } else { Self::Ipv4 }
    }

    pub(crate) fn number(self) -> u8 {
        match self {
            Self::Ipv4 => NFPROTO_IPV4,
            Self::Ipv6 => NFPROTO_IPV6,
            Self::Bridge => NFPROTO_BRIDGE,
        }
    }
}

/// Hooks at which addresses are translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// Packets that arrive at this host.
    Prerouting,
    /// Packets sent by this host.
    Output,
    /// Packets that are about to leave this host.
    Postrouting,
}

impl Hook {
    /// Number of the hook (NF_INET_…) and its usual priority (NF_IP_PRI_NAT_DST, NF_IP_PRI_NAT_SRC).
    fn parts(self) -> (u32, i32) {
        match self {
            Self::Prerouting => (0, -100),
            Self::Output => (3, -100),
            Self::Postrouting => (4, 100),
        }
    }
}

/// A protocol with ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Protocol {
    /// Transmission Control Protocol.
    Tcp = 6,
    /// User Datagram Protocol.
    Udp = 17,
    /// Stream Control Transmission Protocol.
    Sctp = 132,
}

/// Rules and elements of one owner and one address family that are added together.
#[derive(Debug)]
pub struct Rules<'a> {
    pub(crate) batch: Batch,
    pub(crate) family: Family,
    pub(crate) table: &'a str,
    pub(crate) owner: &'a str,
}

/// The position of a new rule in its chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RulePosition {
    /// Before all other rules.
    First,
    /// After all other rules.
    Last,
}

pub(crate) fn kind(message: u16) -> u16 {
    u16::from(NFNL_SUBSYS_NFTABLES) << 8 | message
}

/// Adds the message that starts or ends a transaction.
pub(crate) fn border(batch: &mut Batch, message: u16) {
    batch.message(message, 0, &[0, 0, 0, NFNL_SUBSYS_NFTABLES], "change", "nftables");
}

/// Adds a table if it does not exist.
pub(crate) fn add_table(batch: &mut Batch, family: Family, table: &str) {
    let header = [family.number(), 0, 0, 0];
    batch.message(kind(NFT_MSG_NEWTABLE), NLM_F_CREATE, &header, "make nftables table", table);
    batch.text(NFTA_TABLE_NAME, table);
}

/// Adds a chain if it does not exist; a chain with a type, hook number and priority is a base chain.
pub(crate) fn add_chain(
    batch: &mut Batch,
    family: Family,
    table: &str,
    name: &str,
    hook: Option<(&str, u32, i32)>,
) {
    let (header, target) = ([family.number(), 0, 0, 0], format!("{table} {name}"));
    batch.message(kind(NFT_MSG_NEWCHAIN), NLM_F_CREATE, &header, "make nftables chain", target);
    batch.text(NFTA_CHAIN_TABLE, table);
    batch.text(NFTA_CHAIN_NAME, name);
    if let Some((purpose, number, priority)) = hook {
        let nest = batch.nest(NFTA_CHAIN_HOOK);
        batch.number(NFTA_HOOK_HOOKNUM, number);
        batch.number(NFTA_HOOK_PRIORITY, priority as u32);
        batch.end(nest);
        batch.text(NFTA_CHAIN_TYPE, purpose);
    }
}

/// The user data of a rule or an element with its owner's name as the comment.
pub(crate) fn comment(owner: &str) -> Vec<u8> {
    let text = format!("{owner}\0");
    let mut bytes = vec![USERDATA_COMMENT, text.len() as u8];
    bytes.extend(text.bytes());
    bytes
}

/// The owner that is named by user data.
pub(crate) fn owner(userdata: &[u8]) -> Option<&str> {
    match userdata {
        [USERDATA_COMMENT, length, rest @ ..] => rest.get(..usize::from(*length)).map(text),
        _ => None,
    }
}

impl<'a> Rules<'a> {
    /// Starts rules of `owner`, a name of up to 128 bytes, in `table`, which is created if it does not exist.
    pub fn new(table: &'a str, owner: &'a str, family: Family) -> Self {
        Self::since(table, owner, family, None)
    }

    /// Starts rules which are only added if nothing has changed since the kernel's rules had this generation number.
    fn since(table: &'a str, owner: &'a str, family: Family, generation: Option<&[u8]>) -> Self {
        let mut batch = Batch::default();
        border(&mut batch, NFNL_MSG_BATCH_BEGIN);
        if let Some(generation) = generation {
            batch.attribute(NFNL_BATCH_GENID, generation);
        }
        add_table(&mut batch, family, table);
        Self { batch, family, table, owner }
    }

    /// Adds a chain of address translation if it does not exist. A chain with a smaller `delay` sees a packet earlier, and
    /// the first that translates it decides; 0 is where other tools are.
    pub fn base_chain(&mut self, name: &str, hook: Hook, delay: i32) {
        let (number, priority) = hook.parts();
        add_chain(&mut self.batch, self.family, self.table, name, Some(("nat", number, priority + delay)));
    }

    /// Adds a chain of the frames that arrive at ports of bridges if it does not exist, for [`Family::Bridge`].
    pub fn frames_chain(&mut self, name: &str, hook: FramesHook) {
        let number = match hook {
            FramesHook::Prerouting => 0,
            FramesHook::Input => 1,
        };
        let hook = Some(("filter", number, FRAMES_PRIORITY));
        add_chain(&mut self.batch, self.family, self.table, name, hook);
    }

    /// Adds a chain without a hook if it does not exist.
    pub fn chain(&mut self, name: &str) {
        add_chain(&mut self.batch, self.family, self.table, name, None);
    }

    /// Adds a rule to a chain.
    pub fn rule(&mut self, chain: &str, position: RulePosition, write: &dyn Fn(&mut Rule<'_>)) {
        let flags = match position {
            RulePosition::First => NLM_F_CREATE,
            RulePosition::Last => NLM_F_CREATE | NLM_F_APPEND,
        };
        let target = format!("{} {chain}", self.table);
        self.batch.message(
            kind(NFT_MSG_NEWRULE),
            flags,
            &[self.family.number(), 0, 0, 0],
            "add nftables rule to",
            target,
        );
        self.batch.text(NFTA_RULE_TABLE, self.table);
        self.batch.text(NFTA_RULE_CHAIN, chain);
        self.batch.attribute(NFTA_RULE_USERDATA, &comment(self.owner));
        let nest = self.batch.nest(NFTA_RULE_EXPRESSIONS);
        write(&mut Rule { batch: &mut self.batch, family: self.family });
        self.batch.end(nest);
    }

    /// Adds rules that drop packets from other hosts or pods to and from 127.0.0.0/8. They must be added before
    /// `net.ipv4.conf.LINK.route_localnet` is set: without this setting the kernel drops such packets itself (RFC 1122,
    /// 3.2.1.3); with it every neighbour on the link could reach services on the node's loopback interface
    /// (CVE-2020-8558), and say to others that it is the node, unless `rp_filter` is set: Linux 6.18 drops 127.0.0.1 as a source
    /// then, but not 127.0.0.2. Replies to connections from 127.0.0.1 to a published port are not affected: the connections are
    /// masqueraded, so replies on the link have another destination.
    ///
    /// The rules are those of all links, and are replaced each time. They have no owner and are kept with the table,
    /// because `route_localnet` also stays set.
    pub fn guard_loopback(&mut self) {
        add_chain(&mut self.batch, self.family, self.table, GUARD, Some(GUARD_HOOK));
        let (header, target) = ([self.family.number(), 0, 0, 0], format!("{} {GUARD}", self.table));
        // Without a handle this removes all rules of the chain.
        self.batch.message(kind(NFT_MSG_DELRULE), 0, &header, "empty nftables chain", target.clone());
        self.batch.text(NFTA_RULE_TABLE, self.table);
        self.batch.text(NFTA_RULE_CHAIN, GUARD);
        for is_source in [false, true] {
            let flags = NLM_F_CREATE | NLM_F_APPEND;
            let target = target.clone();
            self.batch.message(kind(NFT_MSG_NEWRULE), flags, &header, "add nftables rule to", target);
            self.batch.text(NFTA_RULE_TABLE, self.table);
            self.batch.text(NFTA_RULE_CHAIN, GUARD);
            self.batch.attribute(NFTA_RULE_USERDATA, &comment("CVE-2020-8558"));
            let nest = self.batch.nest(NFTA_RULE_EXPRESSIONS);
            let mut rule = Rule { batch: &mut self.batch, family: self.family };
            rule.not_from_link("lo");
            match is_source {
                true => rule.from(LOOPBACK),
                false => rule.to(LOOPBACK),
            }
            rule.drop_packet();
            self.batch.end(nest);
        }
    }

    /// Commits all rules or none.
    ///
    /// # Errors
    /// [`Error`] with the first failure.
    pub fn commit(mut self, socket: &Socket) -> Result<(), Error> {
        self.batch.acknowledge();
        border(&mut self.batch, NFNL_MSG_BATCH_END);
        socket.run(self.batch)
    }
}

impl Batch {
    /// Adds a number in big endian.
    pub(crate) fn number(&mut self, kind: u16, value: u32) {
        self.attribute(kind, &value.to_be_bytes());
    }
}

impl Socket {
    /// Removes the rules and elements of `owner` in `table`, of all families, which are searched among all of the table.
    /// Missing ones are success.
    ///
    /// # Errors
    /// [`Error`] if the kernel refuses the request.
    pub fn remove_rules(&self, table: &str, owner: &str) -> Result<(), Error> {
        Family::ALL.into_iter().try_for_each(|family| self.remove_rules_of_family(table, owner, family))
    }

    fn remove_rules_of_family(&self, table: &str, owner: &str, family: Family) -> Result<(), Error> {
        let mut outcome = Ok(());
        for _ in 0..TRIES {
            let rules = self.rules_of(table, owner, family)?;
            let elements = self.elements_of(table, owner, family)?;
            if rules.is_empty() && elements.is_empty() {
                return Ok(());
            }
            let mut batch = Batch::default();
            border(&mut batch, NFNL_MSG_BATCH_BEGIN);
            for rule in &rules {
                remove_rule(&mut batch, family, table, rule);
            }
            for element in &elements {
                set::remove(&mut batch, family, table, element);
            }
            batch.acknowledge();
            border(&mut batch, NFNL_MSG_BATCH_END);
            outcome = self.run(batch);
            match &outcome {
                // Another program removed one meanwhile, so the whole transaction failed.
                Err(error) if error.errno == Errno::ENOENT => {}
                _ => return outcome,
            }
        }
        outcome
    }

    /// The rules of `owner` in a table.
    fn rules_of(&self, table: &str, owner: &str, family: Family) -> Result<Vec<FoundRule>, Error> {
        let wanted = comment(owner);
        self.dump(|| list(table, family), |message| read(message, &wanted))
    }

    /// Number of rules of `owner` in a table; 0 if there is no such table.
    ///
    /// # Errors
    /// [`Error`] if the kernel does not answer.
    pub fn count_rules(&self, table: &str, owner: &str, family: Family) -> Result<usize, Error> {
        Ok(self.rules_of(table, owner, family)?.len())
    }

    /// Removes rules by their owners' names and sets by their own names, in one transaction. Returns false if a set is in use: it
    /// has elements, or another rule uses it. Missing ones are success.
    ///
    /// # Errors
    /// [`Error`] if the kernel refuses the request.
    pub fn remove_unused(
        &self,
        table: &str,
        family: Family,
        is_owner: &dyn Fn(&str) -> bool,
        is_set: &dyn Fn(&str) -> bool,
    ) -> Result<bool, Error> {
        let rules = self.dump(
            || list(table, family),
            |message| read_if(message, &|found| owner(found).is_some_and(is_owner)),
        )?;
        let sets = self.sets_of(table, family)?.into_iter().filter(|name| is_set(name));
        let mut batch = Batch::default();
        border(&mut batch, NFNL_MSG_BATCH_BEGIN);
        let empty = batch.len();
        for rule in &rules {
            remove_rule(&mut batch, family, table, rule);
        }
        for name in sets {
            set::remove_if_empty(&mut batch, family, table, &name);
        }
        if batch.len() == empty {
            return Ok(true);
        }
        batch.acknowledge();
        border(&mut batch, NFNL_MSG_BATCH_END);
        match self.run(batch) {
            Ok(()) => Ok(true),
            // The whole transaction has failed.
            Err(error) if matches!(error.errno, Errno::EBUSY | Errno::ENOENT) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Replaces all rules of an owner by those that `write` adds, in one transaction: packets see the rules of before or
    /// those of after. Another change of the kernel's rules meanwhile makes it start anew, so that two processes which do
    /// this at once do not both add their rules.
    ///
    /// # Errors
    /// [`Error`] if the kernel refuses the request.
    pub fn replace_rules(
        &self,
        table: &str,
        owner: &str,
        family: Family,
        write: &dyn Fn(&mut Rules<'_>),
    ) -> Result<(), Error> {
        let mut outcome = Ok(());
        for _ in 0..TRIES {
            let generation = self.generation()?;
            let mut rules = Rules::since(table, owner, family, Some(&generation));
            for rule in self.rules_of(table, owner, family)? {
                remove_rule(&mut rules.batch, family, table, &rule);
            }
            write(&mut rules);
            outcome = rules.commit(self);
            match &outcome {
                Err(error) if error.errno == Errno::ERESTART => {}
                _ => return outcome,
            }
        }
        outcome
    }
}

/// An existing rule: its chain and its handle.
type FoundRule = (String, Vec<u8>);

fn remove_rule(batch: &mut Batch, family: Family, table: &str, (chain, handle): &FoundRule) {
    let target = format!("{table} {chain}");
    batch.message(kind(NFT_MSG_DELRULE), 0, &[family.number(), 0, 0, 0], "remove nftables rule of", target);
    batch.text(NFTA_RULE_TABLE, table);
    batch.text(NFTA_RULE_CHAIN, chain);
    batch.attribute(NFTA_RULE_HANDLE, handle);
}

fn list(table: &str, family: Family) -> Batch {
    let mut batch = Batch::default();
    let header = [family.number(), 0, 0, 0];
    batch.message(kind(NFT_MSG_GETRULE), NLM_F_DUMP, &header, "list nftables rules of", table);
    batch.tolerate(&MISSING);
    batch.text(NFTA_RULE_TABLE, table);
    batch
}

/// Chain and handle of a rule; `None` if its user data is not `wanted`.
fn read(message: &Message<'_>, wanted: &[u8]) -> Option<FoundRule> {
    read_if(message, &|found| found == wanted)
}

/// Chain and handle of a rule; `None` if its user data is not the wanted one.
fn read_if(message: &Message<'_>, is_wanted: &dyn Fn(&[u8]) -> bool) -> Option<FoundRule> {
    if message.kind != kind(NFT_MSG_NEWRULE) {
        return None;
    }
    let value =
        |wanted| message.attributes(HEADER_BYTES).find(|(kind, _)| *kind == wanted).map(|(_, value)| value);
    let (chain, handle) = (value(NFTA_RULE_CHAIN)?, value(NFTA_RULE_HANDLE)?);
    is_wanted(value(NFTA_RULE_USERDATA)?).then(|| (text(chain).to_owned(), handle.to_vec()))
}
