/* SPDX-License-Identifier: MIT */
#ifndef SYS_FAULT_H
#define SYS_FAULT_H
/*
 * Every call that leaves the program - system call, driver call, allocation - asks this hook
 * first, so that a test can fail the k-th one for every k. Without a hook it costs one load.
 */

/* Returns 0, or the positive errno with which the call named `name` shall fail. */
extern int (*sys_fault_hook)(const char *name);

static inline int sys_fault(const char *name)
{
	return __builtin_expect(sys_fault_hook != 0, 0) ? sys_fault_hook(name) : 0;
}

#endif
