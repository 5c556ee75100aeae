/* SPDX-License-Identifier: MIT */
#ifndef CLI_INTERRUPT_H
#define CLI_INTERRUPT_H
/*
 * The first SIGINT, SIGTERM or SIGHUP asks for an orderly end: loops look at interrupt_signal() and
 * stop. A second SIGINT or SIGTERM of the same kind ends the process at once, should the orderly
 * end take too long. A second SIGHUP does not: a terminal that closes may send two.
 */

void interrupt_init(void);

/* The signal that came, or 0. */
int interrupt_signal(void);

/* A folder that is to be removed, if empty, where the process ends at once; NULL: none. It must
 * stay valid. */
void interrupt_litter(const char *folder);

#endif
