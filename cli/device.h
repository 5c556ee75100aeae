/* SPDX-License-Identifier: MIT */
#ifndef CLI_DEVICE_H
#define CLI_DEVICE_H
/*
 * The device of commands that need none to be named: the one asked for, which must work, or else
 * the first GPU if it works, or else the host, with the reason to be told.
 */
#include <stdbool.h>
#include "penstock.h"

#define DEVICE_REASON_MAX sizeof(((struct pen_error *)0)->message)

/*
 * `asked` may be NULL. `why` says why it is the host, and is empty where that was asked for or is
 * not so. A GPU may turn out not to start after this, unless `ready` asks to wait for that.
 */
int device_open(const char *asked, bool ready, struct pen_device **device,
		char why[DEVICE_REASON_MAX], struct pen_error *err);

/* Take the host in place of a GPU that did not start and that nobody asked for by name; false if
 * the device did start. */
bool device_fall_back(struct pen_device **device, char why[DEVICE_REASON_MAX]);

/* "host (cuda:0 cannot be used: ...)", or the name alone. */
void device_print(const char *name, const char *why);

#endif
