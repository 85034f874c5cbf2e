//! Collects the pod and the claims from the documents of texts, and locates errors.

use std::collections::BTreeMap;

use devlet_core::Source;
use devlet_core::dra::claims::ClaimKey;

use super::object::{Head, Kind, Object};
use super::place::{self, Trail};
use super::{
    GivenClaims, InvalidManifest, Manifests, Place, ResolveError, ResourceClaim, Text, UnresolvedPod, claim,
    pod, syntax,
};

/// Collects the pod, the claims and their origins from texts.
pub(super) fn collect(
    texts: &[Text<'_>],
    source: Source,
    foreign: &[String],
) -> Result<(Manifests, Origins), InvalidManifest> {
    let mut collected = Collected::default();
    for (index, Text { text, .. }) in texts.iter().enumerate() {
        collected.add(index, text, source, foreign).map_err(|error| {
            let (trail, problem) = *error;
            located(texts, &(index, trail), problem)
        })?;
    }
    let claims = collected.claims;
    match collected.pod {
        Some(pod) => Ok((Manifests { pod, claims }, collected.origins)),
        None if claims.claims.is_empty() => Err(InvalidManifest::Empty),
        None => Err(InvalidManifest::NoPod),
    }
}

/// Adds the place to a problem, as far as it is known.
fn located(texts: &[Text<'_>], (index, trail): &Origin, problem: InvalidManifest) -> InvalidManifest {
    let Some(Text { name, text }) = texts.get(*index) else {
        return problem;
    };
    let position = match &problem {
        InvalidManifest::Malformed { position, .. } => *position,
        problem => place::position(text, trail, problem),
    };
    let place = Place {
        name: (*name).to_owned(),
        number: (texts.len() > 1).then_some(index + 1),
        position,
    };
    if place.is_unknown() {
        return problem;
    }
    let problem = Box::new(problem);
    InvalidManifest::At { place, problem }
}

/// The index of a text, and the object in it.
type Origin = (usize, Trail);

/// The origins of the pod and the claims.
#[derive(Default)]
pub(super) struct Origins {
    pod: Origin,
    claims: BTreeMap<ClaimKey, Origin>,
}

impl Origins {
    /// Adds the place to an error about a claim: the claim, or the place where the pod names it.
    pub(super) fn locate(&self, texts: &[Text<'_>], namespace: &str, error: ResolveError) -> InvalidManifest {
        let key = match &error {
            ResolveError::NotOwner { claim, .. } => Some(claim.clone()),
            ResolveError::NotReserved { claim, .. } | ResolveError::NotAllocated { claim } => {
                Some(ClaimKey {
                    namespace: namespace.to_owned(),
                    name: claim.clone(),
                })
            }
            _ => None,
        };
        let claim = key.and_then(|key| self.claims.get(&key));
        located(texts, claim.unwrap_or(&self.pod), error.into())
    }
}

#[derive(Default)]
struct Collected {
    pod: Option<UnresolvedPod>,
    claims: GivenClaims,
    origins: Origins,
}

impl Collected {
    /// Adds the objects of a text. An error comes with the object that it is about.
    fn add(
        &mut self,
        index: usize,
        text: &str,
        source: Source,
        foreign: &[String],
    ) -> Result<(), Box<(Trail, InvalidManifest)>> {
        let objects = objects(text).map_err(|problem| Box::new((vec![0], problem)))?;
        let objects = objects
            .into_iter()
            .enumerate()
            .map(|(index, object)| (vec![index], object));
        let mut objects: Vec<(Trail, Object)> = objects.collect();
        objects.reverse();
        if objects.is_empty() {
            return Err(Box::new((Trail::new(), InvalidManifest::Empty)));
        }
        while let Some((trail, mut object)) = objects.pop() {
            let items = object.items.take().unwrap_or_default();
            let items = items.into_iter().flatten().enumerate();
            let items = items.map(|(index, item)| ([&trail[..], &[index]].concat(), item));
            let items: Vec<(Trail, Object)> = items.collect();
            let origin = (index, trail.clone());
            match self.add_object(origin, object, source, foreign) {
                Ok(Kind::List) => objects.extend(items.into_iter().rev()),
                Ok(Kind::Pod | Kind::ResourceClaim) => {}
                Err(problem) => return Err(Box::new((trail, problem))),
            }
        }
        Ok(())
    }

    fn add_object(
        &mut self,
        origin: Origin,
        object: Object,
        source: Source,
        foreign: &[String],
    ) -> Result<Kind, InvalidManifest> {
        let kind = object.kind()?;
        match kind {
            Kind::List => {}
            Kind::Pod => {
                self.add_pod(pod::unresolved(object, source, foreign)?)?;
                self.origins.pod = origin;
            }
            Kind::ResourceClaim => {
                let claim = claim::resource_claim(object)?;
                let key = claim.key.clone();
                self.add_claim(claim)?;
                self.origins.claims.insert(key, origin);
            }
        }
        Ok(kind)
    }

    fn add_pod(&mut self, pod: UnresolvedPod) -> Result<(), InvalidManifest> {
        if let Some(first) = &self.pod {
            let full =
                |pod: &UnresolvedPod| format!("{}/{}", pod.request.name.namespace, pod.request.name.name);
            let (first, second) = (full(first), full(&pod));
            return Err(InvalidManifest::SeveralPods { first, second });
        }
        self.pod = Some(pod);
        Ok(())
    }

    fn add_claim(&mut self, claim: ResourceClaim) -> Result<(), InvalidManifest> {
        let key = claim.key.clone();
        let mut others = self.claims.claims.values();
        if let Some(other) = others.find(|other| other.uid == claim.uid && other.key != key) {
            return Err(InvalidManifest::DuplicateClaimUid {
                first: other.key.clone(),
                second: key,
                uid: claim.uid,
            });
        }
        match self.claims.claims.insert(key.clone(), claim) {
            Some(_) => Err(InvalidManifest::DuplicateClaim(key)),
            None => Ok(()),
        }
    }
}

/// Parses the objects in a text.
fn objects(text: &str) -> Result<Vec<Object>, InvalidManifest> {
    syntax::documents(text).map_err(|malformed| {
        // An object of another kind has another shape, and its kind is the better error.
        let heads: Vec<Head> = syntax::documents(text).unwrap_or_default();
        let foreign = heads.iter().find_map(|head| head.kind().err());
        foreign.unwrap_or(InvalidManifest::Malformed {
            message: malformed.message,
            position: malformed.position,
        })
    })
}
