/* SPDX-License-Identifier: MIT */
#ifndef CLI_EVICT_H
#define CLI_EVICT_H
/*
 * Files that are to come from the store: their pages are taken out of the page cache before a run
 * that measures. What stays is told, since a run that was not cold must not pass for one.
 */
#include "penstock.h"

/* Evict the file `path`, open as `object`; adds what stayed of it to `kept`. */
int evict(const char *path, struct pen_object *object, uint64_t *kept, struct pen_error *err);

/* The line of a report on what stayed, where that is anything. */
void evict_print_kept(uint64_t kept);

#endif
