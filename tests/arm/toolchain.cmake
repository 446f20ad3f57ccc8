# Cross-compiles for ARM with Debian's g++-aarch64-linux-gnu. Programs link statically, so that qemu-user needs no other
# file to run them.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_EXE_LINKER_FLAGS_INIT -static)
