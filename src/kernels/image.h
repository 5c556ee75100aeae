/* SPDX-License-Identifier: MIT */
#ifndef KERNELS_IMAGE_H
#define KERNELS_IMAGE_H
/*
 * The kernels of this folder as a fat binary, which the driver loads by itself: machine code for
 * sm_75, 80, 90, 100 and 120 and their successors in kind, and PTX for GPUs that come later. It is
 * committed (image.fatbin), so that nobody who builds the library needs a CUDA toolkit;
 * tools/build-kernels.sh makes it anew. image.sha256 has the sums of it and of the sources that it
 * was made of, and a test compares them.
 */
extern const unsigned char kernels_image[];

#endif
