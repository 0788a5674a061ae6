//! Flags of other modules' locations, found through nginx's table of directives.

use std::ffi::c_void;

use nginx_sys::{NGX_HTTP_MODULE, ngx_cycle_t, ngx_flag_t, ngx_http_request_t};

/// Where nginx keeps the flag that a directive sets in a location.
#[derive(Clone, Copy, Debug)]
pub struct Flag {
    module: usize,
    offset: usize,
}

impl Flag {
    /// The flag of a directive; `None` if no module of the cycle has it.
    ///
    /// # Safety
    /// `cycle` is live, and the directive sets a flag of its location with nginx's own setter.
    pub unsafe fn of(cycle: *mut ngx_cycle_t, directive: &[u8]) -> Option<Flag> {
        // SAFETY: the modules end with a null, a module's commands with one without a name.
        unsafe {
            let mut next = (*cycle).modules;
            while let Some(module) = (*next).as_ref() {
                next = next.add(1);
                let mut command = module.commands;
                if module.type_ != NGX_HTTP_MODULE as usize || command.is_null() {
                    continue;
                }
                while (*command).name.len > 0 {
                    if (*command).name.as_bytes() == directive {
                        return Some(Flag { module: module.ctx_index, offset: (*command).offset });
                    }
                    command = command.add(1);
                }
            }
        }
        None
    }

    /// Whether it is on in the location that a request is in.
    ///
    /// # Safety
    /// `r` is a live request of the cycle that the flag was found in.
    pub unsafe fn is_on(self, r: *mut ngx_http_request_t) -> bool {
        // SAFETY: each location has a configuration of each http module, merged before requests
        // come; the offset is that which nginx's own setter writes to.
        unsafe {
            let conf: *mut c_void = *(*r).loc_conf.add(self.module);
            !conf.is_null() && *conf.byte_add(self.offset).cast::<ngx_flag_t>() == 1
        }
    }
}
