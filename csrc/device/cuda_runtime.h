// Declares the few CUDA runtime calls that noria makes, and looks them up when a process runs.
//
// A CUDA build of torch ships the runtime (libcudart.so.N) and has loaded it by the time noria is imported. noria uses
// that very library. So noria builds without a CUDA toolkit, and one build serves machines with and without a device.
//
// Ownership: an opened library stays open until the process ends, because streams and events may outlive the backend
//   that made them.
// Threads: any.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

struct CUstream_st;  // the runtime's own names, so that handles have the types that torch uses
struct CUevent_st;

namespace noria::cuda {

using StreamHandle = CUstream_st*;
using EventHandle = CUevent_st*;

/// The values of cudaError_t that noria distinguishes.
enum Error : int { kSuccess = 0, kInvalidDevice = 101, kNotReady = 600, kHostMemoryAlreadyRegistered = 712 };

enum CopyKind : int { kHostToDevice = 1, kDeviceToHost = 2, kDeviceToDevice = 3 };
enum CaptureMode : int { kCaptureGlobal = 0, kCaptureThreadLocal = 1, kCaptureRelaxed = 2 };
enum CaptureStatus : int { kNotCapturing = 0 };

inline constexpr unsigned kStreamNonBlocking = 0x01;
inline constexpr unsigned kEventDefault = 0x00;  // timed
inline constexpr unsigned kEventBlockingSync = 0x01;
inline constexpr unsigned kEventDisableTiming = 0x02;
inline constexpr unsigned kHostRegisterPortable = 0x01;
inline constexpr unsigned kHostRegisterMapped = 0x02;
inline constexpr unsigned kIpcLazyEnablePeerAccess = 0x01;

struct IpcHandle {  // cudaIpcMemHandle_t, passed by value
  char reserved[64];
};

// Lists every call: its return type, its name without "cuda", its parameters. None has changed since CUDA 11.
#define NORIA_CUDA_CALLS(CALL)                                                                                 \
  CALL(Error, GetLastError, ())                                                                                \
  CALL(const char*, GetErrorName, (Error error))                                                               \
  CALL(const char*, GetErrorString, (Error error))                                                             \
  CALL(Error, RuntimeGetVersion, (int* version))                                                               \
  CALL(Error, GetDeviceCount, (int* count))                                                                    \
  CALL(Error, GetDevice, (int* device))                                                                        \
  CALL(Error, SetDevice, (int device))                                                                         \
  CALL(Error, DeviceGetPCIBusId, (char* id, int size, int device))                                             \
  CALL(Error, Malloc, (void** memory, std::size_t size))                                                       \
  CALL(Error, Free, (void* memory))                                                                            \
  CALL(Error, MemGetInfo, (std::size_t* free, std::size_t* total))                                             \
  CALL(Error, IpcGetMemHandle, (IpcHandle * handle, void* memory))                                             \
  CALL(Error, IpcOpenMemHandle, (void** memory, IpcHandle handle, unsigned flags))                             \
  CALL(Error, IpcCloseMemHandle, (void* memory))                                                               \
  CALL(Error, HostRegister, (void* memory, std::size_t size, unsigned flags))                                  \
  CALL(Error, HostUnregister, (void* memory))                                                                  \
  CALL(Error, HostGetDevicePointer, (void** device, void* host, unsigned flags))                               \
  CALL(Error, StreamCreateWithFlags, (StreamHandle * stream, unsigned flags))                                  \
  CALL(Error, StreamDestroy, (StreamHandle stream))                                                            \
  CALL(Error, StreamSynchronize, (StreamHandle stream))                                                        \
  CALL(Error, StreamWaitEvent, (StreamHandle stream, EventHandle event, unsigned flags))                       \
  CALL(Error, StreamIsCapturing, (StreamHandle stream, CaptureStatus * status))                                \
  CALL(Error, ThreadExchangeStreamCaptureMode, (CaptureMode * mode))                                           \
  CALL(Error, LaunchHostFunc, (StreamHandle stream, void (*work)(void* context), void* context))               \
  CALL(Error, EventCreateWithFlags, (EventHandle * event, unsigned flags))                                     \
  CALL(Error, EventDestroy, (EventHandle event))                                                               \
  CALL(Error, EventRecord, (EventHandle event, StreamHandle stream))                                           \
  CALL(Error, EventQuery, (EventHandle event))                                                                 \
  CALL(Error, EventSynchronize, (EventHandle event))                                                           \
  CALL(Error, EventElapsedTime, (float* milliseconds, EventHandle start, EventHandle end))                     \
  CALL(Error, MemcpyAsync, (void* to, const void* from, std::size_t size, CopyKind kind, StreamHandle stream)) \
  CALL(Error, MemsetAsync, (void* memory, int value, std::size_t size, StreamHandle stream))

struct Runtime {
#define NORIA_DECLARE(returns, name, parameters) returns(*name) parameters = nullptr;
  NORIA_CUDA_CALLS(NORIA_DECLARE)
#undef NORIA_DECLARE

  std::string path;  // of the library

  /// Opens the runtime in this library. Throws MachineError if the library cannot be opened, or lacks a call.
  static std::shared_ptr<const Runtime> open(const std::string& path);
  /// Returns the runtime that this process has loaded; otherwise one that the system's linker finds. Returns null if
  /// none can be used, and writes to `absent` why. Keeps what it found once.
  static std::shared_ptr<const Runtime> find(std::string* absent = nullptr);
};

}  // namespace noria::cuda
