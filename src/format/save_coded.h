/* SPDX-License-Identifier: MIT */
#ifndef FORMAT_SAVE_CODED_H
#define FORMAT_SAVE_CODED_H
/*
 * A save that is coded: the packer (pack.h) reads the files that a layout describes, byte for byte
 * as they would be written, out of the tensors' memory. So it writes what packing them would write.
 */
#include "penstock.h"

struct save_coded;

/*
 * Start to pack each file of the layout into the object of its number, behind the callers' streams:
 * their work belongs to what is saved. `device` is the one that it is said to be of.
 * Layout, objects, memory and devices must live until save_coded_wait().
 */
int save_coded_start(const struct pen_layout *layout, const struct pen_save_tensor *tensors,
		     size_t count, struct pen_object *const *objects, struct pen_device *host,
		     struct pen_device *device, const struct pen_options *transfer,
		     struct save_coded **coded, struct pen_error *err);
void save_coded_poll(struct save_coded *coded, struct pen_progress *progress);
void save_coded_cancel(struct save_coded *coded);
int save_coded_wait_for(struct save_coded *coded, double seconds);

/* Wait and release; in a forked child neither, -ECHILD. `report` may be NULL. */
int save_coded_wait(struct save_coded *coded, struct pen_report *report, struct pen_error *err);

#endif
