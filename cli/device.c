/* SPDX-License-Identifier: MIT */
/* The device that is meant; see device.h. */
#include <stdio.h>
#include "base/text.h"
#include "device.h"
#include "report.h"

#define FIRST_GPU "cuda:0"

bool device_fall_back(struct pen_device **device, char why[DEVICE_REASON_MAX])
{
	struct pen_device *host;
	struct pen_error gpu;

	if (!pen_device_ready(*device, &gpu) || pen_device_open("host", &host, NULL))
		return false;
	text_copy(why, DEVICE_REASON_MAX, gpu.message);
	pen_device_close(*device);
	*device = host;
	return true;
}

int device_open(const char *asked, bool ready, struct pen_device **device,
		char why[DEVICE_REASON_MAX], struct pen_error *err)
{
	struct pen_error gpu;

	why[0] = 0;
	if (asked)
		return pen_device_open(asked, device, err);
	if (pen_device_open(FIRST_GPU, device, &gpu)) {
		text_copy(why, DEVICE_REASON_MAX, gpu.message);
		return pen_device_open("host", device, err);
	}
	if (ready)
		device_fall_back(device, why);
	return 0;
}

void device_print(const char *name, const char *why)
{
	printf("%s", name);
	if (!why[0])
		return;
	printf(" (" FIRST_GPU " cannot be used: ");
	report_name(why, 0);
	putchar(')');
}
