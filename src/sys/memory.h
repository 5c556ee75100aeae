/* SPDX-License-Identifier: MIT */
#ifndef SYS_MEMORY_H
#define SYS_MEMORY_H
/*
 * How much memory this process and the page cache may still take. The machine has an answer, and
 * so has each control group that the process is in, from its own up to the root: the least of them
 * holds. What a group has cached of files counts as free, as the machine counts it: it goes when
 * something else is wanted.
 */
#include <stdint.h>

/* Bytes, without swap; UINT64_MAX where nobody says. `root` is what /proc and /sys are found under:
 * "", or the folder of a test. */
uint64_t memory_available(const char *root);

#endif
