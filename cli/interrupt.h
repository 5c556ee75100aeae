/* SPDX-License-Identifier: MIT */
#ifndef CLI_INTERRUPT_H
#define CLI_INTERRUPT_H
/*
 * The first SIGINT or SIGTERM asks for an orderly end: loops look at interrupt_signal() and stop.
 * The second of the same kind ends the process at once, should the orderly end take too long.
 */

void interrupt_init(void);

/* The signal that came, or 0. */
int interrupt_signal(void);

#endif
