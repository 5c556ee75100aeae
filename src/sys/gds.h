/* SPDX-License-Identifier: MIT */
#ifndef SYS_GDS_H
#define SYS_GDS_H
/*
 * Is it the real thing? cuFile falls back to its compatibility mode, which stages in host memory,
 * and does not say so. Whether bytes could go around the host is read from what the system shows:
 * of a machine before the library is even loaded, of a file once it is.
 */
#include <stdbool.h>
#include <stddef.h>

/* Where /proc, /sys and /etc are looked for: "" is this machine; tests make one up. */
extern const char *gds_root;

/*
 * May real GPUDirect Storage - not the compatibility mode - be possible here? 0, or -ENOTSUP with
 * the reason in words. Reads small files below `root`; starts nothing.
 */
int gds_evidence(const char *root, char *reason, size_t size);

/* Would bytes of this file go around the host? false with the reason where cuFile would fall
 * back to its compatibility mode, which it does silently. */
bool gds_real(int fd, char *reason, size_t size);

/* For tests, which have no drive that does: as if all files did. */
extern bool gds_assume_real;

#endif
