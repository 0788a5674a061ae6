//! The shared zone as words: the one place where nginx's shared memory becomes `&[AtomicU64]`.

use std::ffi::c_void;
use std::hash::{BuildHasher, RandomState};
use std::mem;
use std::sync::atomic::AtomicU64;

use nginx_sys::{
    NGX_ERROR, NGX_OK, ngx_conf_t, ngx_int_t, ngx_pagesize, ngx_shared_memory_add, ngx_shm_zone_t,
    ngx_slab_alloc, ngx_slab_pool_t, ngx_str_t,
};

use super::guard;
use super::log::{cycle_log, log};
use super::module::ngx_http_kvc_aware_module;
use crate::blocks::HashKey;
use crate::index::Index;
use crate::shared::Zone;

/// Declares the zone. `None` if one of that name has another size or owner.
///
/// # Safety
/// `cf` is a configuration that is being read.
pub unsafe fn add(cf: *mut ngx_conf_t, name: &str, bytes: usize) -> Option<*mut ngx_shm_zone_t> {
    // SAFETY: the name is copied into the pool, which lives as long as the zone's entry; the
    // tag is the module, so that nginx never hands us the memory of another.
    unsafe {
        let mut name = ngx_str_t::from_bytes((*cf).pool, name.as_bytes())?;
        let tag = (&raw mut ngx_http_kvc_aware_module).cast::<c_void>();
        let zone = ngx_shared_memory_add(cf, &mut name, bytes, tag).as_mut()?;
        zone.init = Some(init);
        Some(zone)
    }
}

/// nginx calls this in the master, for each cycle. A zone that is kept from the last cycle is
/// only looked at: this cycle may still fail, and the other's workers go on with it.
unsafe extern "C" fn init(zone: *mut ngx_shm_zone_t, old: *mut c_void) -> ngx_int_t {
    guard(NGX_ERROR as ngx_int_t, || {
        // SAFETY: nginx has mapped the zone and laid a slab pool at its start.
        let made =
            unsafe { if old.is_null() { format(&mut *zone) } else { reuse(&mut *zone, old) } };
        match made {
            Ok(()) => NGX_OK as ngx_int_t,
            Err(cause) => {
                log!(EMERG, cycle_log(), "kvc_aware_zone: {cause}");
                NGX_ERROR as ngx_int_t
            }
        }
    })
}

/// Takes all pages that the slab pool has: a zone of ours holds nothing else.
unsafe fn format(zone: &mut ngx_shm_zone_t) -> Result<(), String> {
    // SAFETY: the caller's: a fresh zone begins with its slab pool, and nobody else has it yet.
    let words = unsafe {
        let pool = zone.shm.addr.cast::<ngx_slab_pool_t>();
        let bytes = (*pool).pfree * ngx_pagesize;
        let start = ngx_slab_alloc(pool, bytes);
        if start.is_null() {
            return Err("the zone has no room".to_owned());
        }
        zone.data = start;
        words(zone)
    };
    let random = || RandomState::new().hash_one(0u64);
    let made = Zone::format(words, HashKey([random(), random()])).map_err(|e| e.to_string())?;
    Index::format(made.index_words()).map_err(|e| e.to_string())?;
    Ok(())
}

unsafe fn reuse(zone: &mut ngx_shm_zone_t, old: *mut c_void) -> Result<(), String> {
    zone.data = old;
    // SAFETY: the same mapping as before, so the pointer into it is still right.
    let made = Zone::open(unsafe { words(zone) }).map_err(|e| e.to_string())?;
    Index::open(made.index_words()).map_err(|e| e.to_string())?;
    Ok(())
}

/// The words of a zone that [`init`] has seen.
///
/// # Safety
/// `zone` is mapped, and stays so while the words are used: nginx unmaps a zone only after the
/// cycle that named it, and a process of that cycle ends before.
unsafe fn words<'a>(zone: &ngx_shm_zone_t) -> &'a [AtomicU64] {
    // SAFETY: `data` points to pages of the zone, aligned far beyond 8, up to the pool's end;
    // every process sees them as atomics only.
    unsafe {
        let pool = zone.shm.addr.cast::<ngx_slab_pool_t>();
        let start = zone.data.cast::<AtomicU64>();
        let bytes = (*pool).end as usize - start as usize;
        std::slice::from_raw_parts(start, bytes / mem::size_of::<AtomicU64>())
    }
}

/// The zone as a worker sees it.
///
/// # Safety
/// The process's cycle is live and named this zone; the view is used in this process only.
pub unsafe fn open(zone: *mut ngx_shm_zone_t) -> Option<Zone<'static>> {
    // SAFETY: the mapping lasts as long as the process's cycle.
    unsafe { Zone::open(words(&*zone)).ok() }
}
