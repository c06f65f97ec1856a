//! Accepts forwarded packets from and to a pod in the chain FORWARD of iptables. A packet that one base chain accepts
//! can still be dropped by another, so a separate table would have no effect. The rules are byte for byte those that
//! `iptables-nft` writes: iptables lists coracle's rules, and coracle finds rules that iptables added.
//!
//! ```text
//!   table ip filter, ip6 filter
//!     chain FORWARD       first: comment, jump CNI-FORWARD
//!     chain CNI-FORWARD   first: comment, jump CNI-ADMIN      for the node's administrator
//!                         to the pod, of a known connection: accept
//!                         from the pod: accept
//! ```
//! Chains are kept when the last pod is removed. A change is refused and retried if another program has changed rules
//! since they were read (detected by the generation number); iptables does the same. Rules:
//! include/uapi/linux/netfilter/{nf_tables,nf_tables_compat,xt_conntrack}.h; `firewall` 1.1.1; iptables 1.8.9.

use std::net::IpAddr;

use nix::errno::Errno;

use crate::address::Network;
use crate::message::{Batch, Message, NLM_F_APPEND, NLM_F_CREATE, NLM_F_DUMP, attributes};
use crate::nft::{self, Family};
use crate::rule::{NFT_JUMP, Rule};
use crate::{Error, Socket, TRIES};

const TABLE: &str = "filter";
const FORWARD: &str = "FORWARD";
const PODS: &str = "CNI-FORWARD";
const ADMIN: &str = "CNI-ADMIN";
/// Type, hook and priority of FORWARD (NF_INET_FORWARD, NF_IP_PRI_FILTER).
const HOOK: (&str, u32, i32) = ("filter", 2, 0);
/// Comment of the CNI plugin `firewall`, by which the plugin finds its jumps.
const COMMENT_PODS: &str = "CNI firewall plugin rules";
const COMMENT_ADMIN: &str = "CNI firewall plugin admin overrides";

const NFT_MSG_NEWGEN: u16 = 15;
const NFT_MSG_GETGEN: u16 = 16;
const NFTA_GEN_ID: u16 = 1;
const NFTA_MATCH_NAME: u16 = 1;
const NFTA_MATCH_REV: u16 = 2;
const NFTA_MATCH_INFO: u16 = 3;
const NFTA_IMMEDIATE_DREG: u16 = 1;
const NFTA_IMMEDIATE_DATA: u16 = 2;
const NFTA_DATA_VERDICT: u16 = 2;
const NFTA_VERDICT_CODE: u16 = 1;
const NFTA_VERDICT_CHAIN: u16 = 2;
const NF_ACCEPT: u32 = 1;
/// Size of `struct xt_comment_info` in bytes.
const COMMENT_BYTES: usize = 256;
/// Size of `struct xt_conntrack_mtinfo3` in bytes, rounded up to a multiple of 8.
const CONNTRACK_BYTES: usize = 168;
const CONNTRACK_FLAGS: usize = 146;
const CONNTRACK_STATES: usize = 150;
const XT_CONNTRACK_STATE: u16 = 1;
/// The bits of IP_CT_ESTABLISHED and IP_CT_RELATED.
const KNOWN: u16 = 2 | 4;

impl Rule<'_> {
    /// Adds a match extension of iptables.
    fn matches(&mut self, name: &str, revision: u32, info: &[u8]) {
        self.express("match", &|batch| {
            batch.text(NFTA_MATCH_NAME, name);
            batch.number(NFTA_MATCH_REV, revision);
            batch.attribute(NFTA_MATCH_INFO, info);
        });
    }

    /// Adds a counter, like each rule of iptables, and a verdict.
    fn ends(&mut self, code: u32, chain: &str) {
        self.expression("counter", &[], &[]);
        self.verdict(code, chain);
    }

    /// Adds a verdict (NF_…, NFT_…) and, for a jump, its chain.
    pub(crate) fn verdict(&mut self, code: u32, chain: &str) {
        self.express("immediate", &|batch| {
            batch.number(NFTA_IMMEDIATE_DREG, 0);
            let data = batch.nest_unmarked(NFTA_IMMEDIATE_DATA);
            let verdict = batch.nest_unmarked(NFTA_DATA_VERDICT);
            batch.number(NFTA_VERDICT_CODE, code);
            if !chain.is_empty() {
                batch.text(NFTA_VERDICT_CHAIN, chain);
            }
            batch.end(verdict);
            batch.end(data);
        });
    }
}

/// Encodes a rule's expressions.
fn expressions(family: Family, write: &dyn Fn(&mut Rule<'_>)) -> Vec<u8> {
    let mut batch = Batch::default();
    batch.message(0, 0, &[], "", "");
    let start = batch.len();
    write(&mut Rule { batch: &mut batch, family });
    batch.finish().0.split_off(start)
}

fn jump(family: Family, comment: &str, chain: &str) -> Vec<u8> {
    let mut info = comment.as_bytes().to_vec();
    info.resize(COMMENT_BYTES, 0);
    expressions(family, &|rule| {
        rule.matches("comment", 0, &info);
        rule.ends(NFT_JUMP, chain);
    })
}

/// The two rules for an address: packets to it, and packets from it.
fn accept(family: Family, address: IpAddr) -> [Vec<u8>; 2] {
    let mut info = [0; CONNTRACK_BYTES];
    info[CONNTRACK_FLAGS..][..2].copy_from_slice(&XT_CONNTRACK_STATE.to_ne_bytes());
    info[CONNTRACK_STATES..][..2].copy_from_slice(&KNOWN.to_ne_bytes());
    let own = Network::host(address);
    let answers = expressions(family, &|rule| {
        rule.to(own);
        rule.matches("conntrack", 3, &info);
        rule.ends(NF_ACCEPT, "");
    });
    let own = expressions(family, &|rule| {
        rule.from(own);
        rule.ends(NF_ACCEPT, "");
    });
    [answers, own]
}

/// The expressions of a rule without counters, for comparison.
fn meaning(expressions: &[u8]) -> impl Iterator<Item = &[u8]> {
    let is_counter =
        |element: &[u8]| attributes(element).next() == Some((nft::NFTA_EXPR_NAME, b"counter\0".as_slice()));
    attributes(expressions).map(|(_, element)| element).filter(move |element| !is_counter(element))
}

/// An existing rule: the index of the wanted rule that it equals, and its handle.
type Found = (usize, Vec<u8>);
/// Writes a change of a family's rules, given the wanted rules and those that exist.
type Write<'a> = &'a dyn Fn(&mut Batch, Family, &[Vec<u8>], &[Found]);

impl Socket {
    /// Accepts forwarded packets from these addresses, and replies to them. Idempotent.
    ///
    /// # Errors
    /// [`Error`], also if the kernel lacks iptables' extensions.
    pub fn accept_forwarded(&self, addresses: &[IpAddr]) -> Result<(), Error> {
        self.change_forwarding(addresses, &|batch, family, wanted, found| {
            nft::add_table(batch, family, TABLE);
            nft::add_chain(batch, family, TABLE, FORWARD, Some(HOOK));
            for chain in [PODS, ADMIN] {
                nft::add_chain(batch, family, TABLE, chain, None);
            }
            for (index, expressions) in wanted.iter().enumerate() {
                if found.iter().any(|(place, _)| *place == index) {
                    continue;
                }
                // The jumps come first in their chains.
                let (chain, flags) = match index {
                    0 => (FORWARD, NLM_F_CREATE),
                    1 => (PODS, NLM_F_CREATE),
                    _ => (PODS, NLM_F_CREATE | NLM_F_APPEND),
                };
                change(batch, family, (nft::NFT_MSG_NEWRULE, flags, "add nftables rule to"), chain);
                batch.attribute(nft::NFTA_RULE_EXPRESSIONS, expressions);
            }
        })
    }

    /// Removes the rules of [`Socket::accept_forwarded`]. Missing rules are success.
    ///
    /// # Errors
    /// [`Error`] if the kernel refuses the request.
    pub fn forget_forwarded(&self, addresses: &[IpAddr]) -> Result<(), Error> {
        self.change_forwarding(addresses, &|batch, family, _, found| {
            for (_, handle) in found.iter().filter(|(index, _)| *index > 1) {
                change(batch, family, (nft::NFT_MSG_DELRULE, 0, "remove nftables rule of"), PODS);
                batch.attribute(nft::NFTA_RULE_HANDLE, handle);
            }
        })
    }

    /// Finds the jumps and the rules of `addresses` and calls `write` to change them, in one transaction for each
    /// family; retries if another program has changed rules in between.
    fn change_forwarding(&self, addresses: &[IpAddr], write: Write<'_>) -> Result<(), Error> {
        for family in [Family::Ipv4, Family::Ipv6] {
            let mut wanted = vec![jump(family, COMMENT_PODS, PODS), jump(family, COMMENT_ADMIN, ADMIN)];
            let own = addresses.iter().filter(|address| Family::of(**address) == family);
            wanted.extend(own.flat_map(|address| accept(family, *address)));
            if wanted.len() == 2 {
                continue;
            }
            let is_overtaken = |outcome: &Result<(), Error>| {
                outcome.as_ref().is_err_and(|error| error.errno == Errno::ERESTART)
            };
            let mut outcome = self.try_change(family, &wanted, write);
            for _ in 1..TRIES {
                if !is_overtaken(&outcome) {
                    break;
                }
                outcome = self.try_change(family, &wanted, write);
            }
            outcome?;
        }
        Ok(())
    }

    fn try_change(&self, family: Family, wanted: &[Vec<u8>], write: Write<'_>) -> Result<(), Error> {
        let generation = self.generation()?;
        let mut found = self.find_rules(family, FORWARD, &wanted[..1])?;
        // The first wanted rule is a jump of the other chain.
        let in_pods = self.find_rules(family, PODS, &wanted[1..])?;
        found.extend(in_pods.into_iter().map(|(index, handle)| (index + 1, handle)));
        let mut batch = Batch::default();
        nft::border(&mut batch, nft::NFNL_MSG_BATCH_BEGIN);
        batch.attribute(nft::NFNL_BATCH_GENID, &generation);
        let empty = batch.len();
        write(&mut batch, family, wanted, &found);
        if batch.len() == empty {
            return Ok(());
        }
        batch.acknowledge();
        nft::border(&mut batch, nft::NFNL_MSG_BATCH_END);
        self.run(batch)
    }

    /// The generation number of nftables in this network namespace, as the kernel's bytes, which changes with each
    /// transaction of any program.
    ///
    /// # Errors
    /// [`Error`] if the kernel does not answer.
    pub fn generation(&self) -> Result<Vec<u8>, Error> {
        let mut batch = Batch::default();
        batch.message(nft::kind(NFT_MSG_GETGEN), 0, &[0; nft::HEADER_BYTES], "look at", "nftables");
        batch.acknowledge();
        let mut generation = Vec::new();
        self.ask(batch, &mut |message| {
            if message.kind == nft::kind(NFT_MSG_NEWGEN) {
                let found = message.attributes(nft::HEADER_BYTES).find(|(kind, _)| *kind == NFTA_GEN_ID);
                generation = found.map(|(_, value)| value.to_vec()).unwrap_or_default();
            }
        })?;
        Ok(generation)
    }

    /// The rules of `wanted` that are in a chain; empty if the chain does not exist.
    fn find_rules(&self, family: Family, chain: &str, wanted: &[Vec<u8>]) -> Result<Vec<Found>, Error> {
        let list = || {
            let mut batch = Batch::default();
            change(&mut batch, family, (nft::NFT_MSG_GETRULE, NLM_F_DUMP, "list nftables rules of"), chain);
            batch.tolerate(&[Errno::ENOENT]);
            batch
        };
        self.dump(list, |message| read(message, chain, wanted))
    }
}

/// Starts a message about rules of a chain.
fn change(batch: &mut Batch, family: Family, (message, flags, op): (u16, u16, &'static str), chain: &str) {
    batch.message(nft::kind(message), flags, &[family.number(), 0, 0, 0], op, format!("{TABLE} {chain}"));
    batch.text(nft::NFTA_RULE_TABLE, TABLE);
    batch.text(nft::NFTA_RULE_CHAIN, chain);
}

fn read(message: &Message<'_>, chain: &str, wanted: &[Vec<u8>]) -> Option<Found> {
    let value = |wanted| message.attributes(nft::HEADER_BYTES).find(|(kind, _)| *kind == wanted);
    // Kernels that ignore the chain in the request list the rules of all chains.
    let is_its = value(nft::NFTA_RULE_CHAIN).is_some_and(|(_, name)| crate::message::text(name) == chain);
    if message.kind != nft::kind(nft::NFT_MSG_NEWRULE) || !is_its {
        return None;
    }
    let ((_, handle), (_, there)) = (value(nft::NFTA_RULE_HANDLE)?, value(nft::NFTA_RULE_EXPRESSIONS)?);
    let index = wanted.iter().position(|wanted| meaning(wanted).eq(meaning(there)))?;
    Some((index, handle.to_vec()))
}
